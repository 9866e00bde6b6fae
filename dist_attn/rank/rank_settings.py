"""What a rank is told when it starts: by flags from the agent, and its number by whoever launched the group."""

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

from dist_attn.errors import ConfigError
from dist_attn.launchers import read_launch
from dist_attn.rank_link.rows import GRAIN
from dist_attn.wire.weights import WeightPrecision

__all__ = ["RankSettings", "rank_from_environment"]


@dataclass(frozen=True)
class RankSettings:
    """One rank of one epoch. Units: names that end in `_s` are seconds."""

    controller: str
    epoch: int
    ranks: int
    rank: int
    model: str
    backend: str = "gloo"
    engine: str = ""  # the name of the controller that it belongs to
    keys_dir: str = ""  # the folder; keys themselves stand in no command line
    heartbeat_s: float = 0.5
    silence_deadline_s: float = 10.0
    exchange_deadline_s: float = 30.0
    start_deadline_s: float = 180.0  # for all ranks to come to the rendezvous
    rendezvous: str = ""  # where ranks meet that agents have started one by one; see dist_attn.comm.rendezvous
    listener: int | None = None  # rank 0 of several hosts: the descriptor of the socket that listens there
    chunk_tokens: int = GRAIN  # per rank: how texts are cut, which stored states tell
    check_finite: bool = False
    weights: WeightPrecision = "float32"

    @classmethod
    def from_flags(cls, arguments: list[str]) -> "RankSettings":
        """Read the agent's flags; exits with code 2 and a message on stderr if they do not fit.

        Raises: ConfigError if the environment does not tell which rank this is.
        """
        parser = argparse.ArgumentParser(prog="python -m dist_attn.rank", description="One rank of the engine.")
        parser.add_argument("--controller", required=True, help="ZeroMQ address of the controller")
        parser.add_argument("--epoch", type=int, required=True)
        parser.add_argument("--ranks", type=int, required=True)
        parser.add_argument("--model", required=True, help="model folder")
        parser.add_argument("--chunk-tokens", type=int, default=cls.chunk_tokens)
        parser.add_argument("--backend", default=cls.backend)
        parser.add_argument("--engine", default=cls.engine, help="the controller's own name")
        parser.add_argument("--keys-dir", default=cls.keys_dir, help="folder with this host's keys")
        parser.add_argument("--rendezvous", default=cls.rendezvous, help="where the ranks meet, as a URL")
        parser.add_argument("--listener", type=int, help="descriptor of the socket that listens there")
        for name in ("heartbeat_s", "silence_deadline_s", "exchange_deadline_s", "start_deadline_s"):
            parser.add_argument(f"--{name.replace('_', '-')}", type=float, default=getattr(cls, name))
        parser.add_argument("--weights", choices=get_args(WeightPrecision), default=cls.weights)
        parser.add_argument("--check-finite", action="store_true", help="name the first NaN or infinity; slower")
        given = parser.parse_args(arguments)
        return cls(rank=rank_from_environment(os.environ, given.ranks), **vars(given))


def rank_from_environment(environ: Mapping[str, str], ranks: int) -> int:
    """The number of this rank, as the launcher says; alone it is 0.

    Raises: ConfigError if the launcher started another number of ranks.
    """
    launch = read_launch(environ)
    if launch is not None:
        rank, size = launch.rank, ranks if launch.size_variable == "" else launch.size
        if rank is None or size != ranks or rank >= ranks:
            raise ConfigError(
                f"{launch.rank_variable}={rank} of {launch.size_variable}={size} does not fit --ranks {ranks}"
            )
        return rank
    if ranks != 1:
        raise ConfigError(f"--ranks is {ranks}, but neither RANK nor mpiexec says which rank this is")
    return 0
