"""The settings of one controller and its agent, which are flags too: `[engine]` and a few values besides."""

import json
import os
import re
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, model_validator

from dist_attn.errors import ConfigError, InputError
from dist_attn.launchers import place_on_host
from dist_attn.log_lines import LogFormat
from dist_attn.model_config.figures import GRAIN
from dist_attn.settings import DataFolder, EngineSettings, FlagSettings, Settings, read_settings
from dist_attn.shipped import resolve_model_folder
from dist_attn.wire.choices import LogLevel
from dist_attn.wire.curve import check_exposure
from dist_attn.wire.sockets import check_address

STORE_VARIABLE = "DIST_ATTN_STORE__BLOBS"  # of a controller that we start: no password stands in a command line
AGENT_NAME = re.compile(r"[A-Za-z0-9._-]{1,100}")


def _from_json(value: Any) -> Any:
    """Read a flag's list, which is JSON."""
    return json.loads(value) if isinstance(value, str) else value


class ControlSettings(FlagSettings, EngineSettings):
    """The configuration of one controller, its agent and its ranks: the section `[engine]` and a few values more.

    Units: names that end in `_s` are seconds, in `_tokens` tokens; block sizes are per rank.
    Raises: ConfigError for values that do not fit.
    """

    model: str = Field(description="model folder")
    data_dir: str = Field(default="data", description="where states are kept while requests run")
    store: str = Field(
        default="",
        repr=False,
        description="the address of stored states, as the API's store.blobs or store.address; empty: in data_dir",
    )
    log_level: LogLevel = Field(default="info", description="the least severe lines that are logged")
    log_format: LogFormat = Field(default="auto", description="auto: words on a terminal, JSON lines elsewhere")
    parent: int = Field(
        default=0, ge=0, description="exit when this process is no longer the parent; 0: nobody in particular"
    )
    rank_command: Annotated[tuple[str, ...], BeforeValidator(_from_json)] = Field(
        default=(), description="what starts one rank, as a JSON list; empty: python -m dist_attn.rank"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        for address in (self.api_address, self.rank_address):
            if address:
                check_address(address)
                check_exposure(address, self.keys_dir, insecure=self.insecure_network)
        if self.agents > self.ranks:
            raise ConfigError(f"agents is {self.agents} and ranks is {self.ranks}: every agent needs a rank to start")
        if self.agents > 1 and not self.rank_address:
            raise ConfigError(
                f"agents is {self.agents}, but rank_address is not set, so no other host can connect: give tcp://HOST:PORT"
            )
        if self.agents > 1 and self.backend == "mpi":
            raise ConfigError(f"agents is {self.agents}, and ranks over mpi are of one host: choose auto, gloo or nccl")
        if not AGENT_NAME.fullmatch(self.host_name):
            raise ConfigError(
                f"agent_name {self.host_name!r} cannot be used: give letters, digits, dots, dashes and underscores, "
                "at most 100"
            )
        if self.ranks > 1 and self.backend == "local":
            raise ConfigError(f"backend local has no way between {self.ranks} ranks: choose auto, gloo, nccl or mpi")
        if self.heartbeat_deadline_s < 2 * self.heartbeat_s:
            # Every rank would count as dead between two of its signs of life, and be killed again and again.
            raise ConfigError(
                f"heartbeat_deadline_s is {self.heartbeat_deadline_s:g}; it must be at least twice heartbeat_s, "
                f"which is {self.heartbeat_s:g}"
            )
        for name in ("block_tokens", "beside_decode_tokens", "chunk_tokens", "save_tokens"):
            if getattr(self, name) % GRAIN:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be a multiple of {GRAIN}")
        return self

    @property
    def store_address(self) -> str:
        """The address of the blobs of stored states."""
        return self.store or str(Path(self.data_dir) / DataFolder.STATES)

    @property
    def host_name(self) -> str:
        """The name of this agent among a controller's: its host's, and its number where a launcher gives it one."""
        place = place_on_host(os.environ)
        return self.agent_name or socket.gethostname() + ("" if place is None else f"-{place[0]}")

    @property
    def rank_program(self) -> tuple[str, ...]:
        """The command that starts one rank, without its flags."""
        return self.rank_command or (sys.executable, "-m", "dist_attn.rank")

    @classmethod
    def of(cls, tree: Settings, **own: Any) -> "ControlSettings":
        """The controller's part of the whole tree, under values of its own.

        Raises: ModelFolderError for a model that is neither a folder nor the name of one that ships; ConfigError.
        """
        shared = {"data_dir": str(tree.data_dir), "log_level": tree.log_level, "log_format": tree.log_format}
        shared["store"] = tree.store.blobs or tree.store.address
        if tree.model and "model" not in own:
            own["model"] = str(resolve_model_folder(tree.model))
        return cls(**{**dict(tree.engine), **shared, **own})

    @classmethod
    def of_encoder(cls, tree: Settings) -> "ControlSettings":
        """The settings of the encoder's controller, whose ranks are all on this host.

        Raises: as `of`.
        """
        own = tree.encoder
        here: dict[str, Any] = {"agents": 1, "local_agent": True, "rank_address": "", "weights_over_ranks": False}
        here["data_dir"] = str(tree.data_dir / DataFolder.ENCODER)
        here["store"] = tree.store.blobs or tree.store.address or str(tree.data_dir / DataFolder.STATES)
        model = str(resolve_model_folder(own.model))
        ranks = tree.engine.ranks if own.ranks is None else own.ranks
        return cls.of(tree, model=model, ranks=ranks, weights=own.weights, api_address=own.api_address, **here)

    @classmethod
    def from_flags(
        cls, arguments: list[str], program: str, environment: Mapping[str, str] | None = None
    ) -> "ControlSettings":
        """Read the settings of a start: flags over `environment`, both over the file that --config or it names.

        A process that another of ours has started (it is told `parent`) has all it needs in its flags, and nothing
        else counts but STORE_VARIABLE. Exits with code 2 and a message on stderr if the values do not fit.
        """
        usage = f"{program} --api-address ipc://PATH --model FOLDER [more flags; see --help]"
        parser = cls.parser(program, usage, "`dist-attn config show` lists the settings that flags come over.")
        parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file with settings")
        flags = {name: value for name, value in vars(parser.parse_args(arguments)).items() if value is not None}
        file = flags.pop("config", None)
        try:
            if "parent" in flags:
                return cls(**{"store": (environment or {}).get(STORE_VARIABLE, ""), **flags})
            return cls.of(read_settings(file, environment=environment or {}).settings, **flags)
        except InputError as error:
            parser.error(str(error))
