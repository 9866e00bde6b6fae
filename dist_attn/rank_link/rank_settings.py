"""The settings with which a rank starts: by flags from the agent, and its number by the launcher of the group."""

import os
from collections.abc import Mapping

from pydantic import Field

from dist_attn.errors import ConfigError
from dist_attn.launchers import read_launch
from dist_attn.settings import FlagSettings, RankTerms


class RankSettings(FlagSettings, RankTerms):
    """The settings of one rank of one epoch."""

    controller: str = Field(description="ZeroMQ address of the controller")
    epoch: int = Field(ge=0, description="the life of the group of ranks that this one belongs to")
    rank: int = Field(default=0, ge=0, description="the number of this rank: the launcher's to say, not a flag's")
    model: str = Field(description="model folder")
    engine: str = Field(default="", description="the controller's own name")
    rendezvous: str = Field(default="", description="where ranks meet that agents have started one by one, as a URL")
    listener: int | None = Field(
        default=None, description="rank 0 of several hosts: the descriptor of the socket that listens there"
    )

    @classmethod
    def from_flags(cls, arguments: list[str]) -> "RankSettings":
        """Read the agent's flags; exits with code 2 and a message on stderr if they do not fit.

        Raises: ConfigError if the environment does not tell which rank this is.
        """
        program = "python -m dist_attn.rank"
        parser = cls.parser(
            program, f"{program} --controller ADDRESS --epoch N --model FOLDER", "One rank of the engine."
        )
        flags = {name: value for name, value in vars(parser.parse_args(arguments)).items() if value is not None}
        try:
            settings = cls(**flags)
        except ConfigError as error:
            parser.error(str(error))
        return settings.replace(rank=rank_from_environment(os.environ, settings.ranks))


def rank_from_environment(environ: Mapping[str, str], ranks: int) -> int:
    """The number of this rank, as the launcher says; alone it is 0.

    Raises: ConfigError if the launcher started another number of ranks, or none says which of several this is.
    """
    launch = read_launch(environ)
    if launch is not None:
        rank, size = launch.rank, ranks if launch.size_variable == "" else launch.size
        if rank is None or size != ranks or rank >= ranks:
            of = f" of {launch.size_variable}={size}" if launch.size_variable else ""
            raise ConfigError(f"{launch.rank_variable}={rank}{of} does not fit --ranks {ranks}")
        return rank
    if ranks != 1:
        raise ConfigError(f"--ranks is {ranks}, but neither RANK nor mpiexec says which rank this is")
    return 0
