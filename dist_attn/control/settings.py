"""Every value the control plane can be told: frozen, written and read as command-line flags, and from the settings."""

import argparse
import os
import re
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

import msgspec

from dist_attn.errors import ConfigError, InputError
from dist_attn.log_lines import LogFormat
from dist_attn.rank_link.rows import GRAIN
from dist_attn.settings import Settings, read_settings
from dist_attn.shipped import resolve_model_folder
from dist_attn.wire.curve import check_exposure
from dist_attn.wire.sockets import check_address
from dist_attn.wire.weights import WeightPrecision

__all__ = ["BACKENDS", "ControlSettings", "engine_fields", "threads_for"]

AGENT_NAME = re.compile(r"[A-Za-z0-9._-]{1,100}")
BACKENDS = ("local", "gloo", "nccl", "mpi")
LOG_LEVELS = ("debug", "info", "warning", "error")
CHOICES = {"weights": WeightPrecision, "log_format": LogFormat}


class ControlSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The configuration of one controller, its agent and its ranks.

    Units: names that end in `_s` are seconds, in `_tokens` tokens; block sizes are per rank.
    Raises: ConfigError for values that do not fit.
    """

    # where things are
    api_address: str = ""  # where API processes connect; agents need none
    model: str
    data_dir: str = "data"
    rank_address: str = ""  # where ranks and agents connect; empty: a socket in a private folder
    log_level: str = "info"
    log_format: LogFormat = "auto"  # words on a terminal, JSON elsewhere; or one of them everywhere
    keys_dir: str = ""  # folder with the keys for tcp:// addresses
    insecure_network: bool = False  # tcp:// addresses of a network may go without keys
    parent: int = 0  # exit when this process is no longer the parent; 0: nobody in particular

    # the ranks
    ranks: int = 1
    backend: str = "gloo"
    rank_command: tuple[str, ...] = ()  # what starts one rank; empty: `python -m dist_attn.rank`
    agents: int = 1  # hosts that share the ranks; a group starts when so many agents are here
    local_agent: bool = True  # start an agent on this machine, and again if it dies
    agent_name: str = ""  # of this host among the agents; empty: the host's own name
    host_address: str = ""  # where other hosts reach this one's ranks; empty: that by which it reaches the controller
    weights: WeightPrecision = "float32"  # in which precision the model's weights lie in memory
    check_finite: bool = False  # ranks name the first NaN or infinity, and where it is; slower

    # how work is cut
    block_tokens: int = 2048
    beside_decode_tokens: int = GRAIN
    chunk_tokens: int = GRAIN  # every text is cut into blocks of so many, always the same
    save_tokens: int = 16 * GRAIN  # states are saved so often; after a loss so much is read again at most
    save_draws: int = 256  # the same for drawn tokens
    save_s: float = 0.5  # or after so long, where the states of all requests are few enough bytes for that
    steps_in_flight: int = 2
    blocks_of_credit: int = 4
    step_s: float = 0.25  # how long a step reads at most, as far as a chunk allows: what comes meanwhile waits for it
    patience_s: float = 0.05  # how long tokens wait for more of them to fill a block

    # how much is taken on
    max_open: int = 512
    max_waiting_tokens: int = 1 << 26  # to be read or drawn, of all open requests of a class and those before it
    max_active: int = 128

    # how long we wait
    tokens_deadline_s: float = 600.0  # for the next tokens of a request
    ready_deadline_s: float = 120.0  # of a new request for ranks that are not ready
    reader_deadline_s: float = 120.0  # for an API process that does not read
    start_deadline_s: float = 180.0  # for all ranks to load
    heartbeat_s: float = 0.5
    heartbeat_deadline_s: float = 4.0
    stall_limit_s: float = 20.0  # without progress inside a step
    exchange_deadline_s: float = 30.0  # of every exchange between ranks
    silence_deadline_s: float = 10.0  # ranks and agents exit when they hear nothing for this long
    drain_s: float = 0.0  # for open requests to finish when it is asked to stop; then the next controller has them
    stop_deadline_s: float = 5.0

    # after a failure
    backoff_s: float = 0.25
    backoff_max_s: float = 15.0
    stable_s: float = 60.0  # a group that ran this long has recovered
    crashes_to_open: int = 5  # within stable_s: open the circuit
    cool_down_s: float = 30.0
    # In a row: then a request that the ranks worked on each time, and that came no further, fails. Eight, as one life
    # in three is too short to get further in where ranks are killed every other second.
    losses_to_fail: int = 8

    def __post_init__(self) -> None:
        for address in (self.api_address, self.rank_address):
            if address:
                check_address(address)
                check_exposure(address, self.keys_dir, insecure=self.insecure_network)
        if self.backend not in BACKENDS:
            raise ConfigError(f"backend {self.backend!r} is not known; choose one of {', '.join(BACKENDS)}")
        if self.log_level not in LOG_LEVELS:
            raise ConfigError(f"log_level {self.log_level!r} is not known; choose one of {', '.join(LOG_LEVELS)}")
        if self.weights not in get_args(WeightPrecision):
            known = ", ".join(get_args(WeightPrecision))
            raise ConfigError(f"weights {self.weights!r} are not known; choose one of {known}")
        if self.agents > self.ranks:
            raise ConfigError(f"agents is {self.agents} and ranks is {self.ranks}: every agent needs a rank to start")
        if self.agents > 1 and not self.rank_address:
            raise ConfigError(
                f"agents is {self.agents}, but rank_address is not set, so no other host can connect: give tcp://HOST:PORT"
            )
        if not AGENT_NAME.fullmatch(self.host_name):
            raise ConfigError(f"agent_name {self.host_name!r} cannot be used: give letters, digits, dots and dashes")
        if self.ranks > 1 and self.backend == "local":
            raise ConfigError(f"backend local has no way between {self.ranks} ranks: choose gloo, nccl or mpi")
        if self.heartbeat_deadline_s < 2 * self.heartbeat_s:
            # Every rank would count as dead between two of its signs of life, and be killed again and again.
            raise ConfigError(
                f"heartbeat_deadline_s is {self.heartbeat_deadline_s:g}; it must be at least twice heartbeat_s, "
                f"which is {self.heartbeat_s:g}"
            )
        for name in ("block_tokens", "beside_decode_tokens", "chunk_tokens", "save_tokens"):
            if getattr(self, name) < GRAIN or getattr(self, name) % GRAIN:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be a multiple of {GRAIN}")
        for name, kind in get_type_hints(type(self)).items():
            lowest = 0 if name == "parent" else 1
            if kind is int and getattr(self, name) < lowest:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be {lowest} or more")
            if kind is float and not getattr(self, name) > 0 and name != "drain_s":
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be more than 0")
        if self.drain_s < 0:
            raise ConfigError(f"drain_s is {self.drain_s:g}; it must be 0 (hand over at once) or more")

    def replace(self, **changes: Any) -> "ControlSettings":
        """The same settings but for `changes`. Raises: ConfigError for values that do not fit."""
        return msgspec.structs.replace(self, **changes)

    @property
    def starts_by(self) -> Literal["direct", "mpiexec"]:
        """What starts the ranks: each host's agent one by one, or MPI's launcher."""
        return "mpiexec" if self.backend == "mpi" and self.ranks > 1 else "direct"

    @property
    def host_name(self) -> str:
        """The name of this host among the agents of a controller."""
        return self.agent_name or socket.gethostname()

    @property
    def rank_program(self) -> tuple[str, ...]:
        """The command that starts one rank, without its flags."""
        return self.rank_command or (sys.executable, "-m", "dist_attn.rank")

    def to_flags(self) -> list[str]:
        """The command-line flags that `from_flags` reads back to an equal value; defaults are left out."""
        flags: list[str] = []
        for name, default in _defaults(type(self)).items():
            value = getattr(self, name)
            if value != default:
                text = msgspec.json.encode(value).decode() if isinstance(value, tuple | bool) else str(value)
                flags.append(f"--{name.replace('_', '-')}={text}")
        return flags

    @classmethod
    def from_flags(
        cls, arguments: list[str], program: str, environment: Mapping[str, str] | None = None
    ) -> "ControlSettings":
        """The settings of a start: flags over `environment`, both over the file that --config or it names.

        A process that another of ours has started (it is told `parent`) has all it needs in its flags, and nothing
        else counts. Exits with code 2 and a message on stderr if the values do not fit.
        """
        parser = _parser(cls, program)
        given = {name: value for name, value in vars(parser.parse_args(arguments)).items() if value is not None}
        file = given.pop("config", None)
        try:
            for name, kind in get_type_hints(cls).items():
                if name in given and (kind is bool or name == "rank_command"):
                    given[name] = msgspec.json.decode(given[name])
            if "parent" not in given:
                given = {**engine_fields(read_settings(file, environment=environment or {}).settings), **given}
            for name, default in _defaults(cls).items():
                if default is msgspec.NODEFAULT and name not in given:
                    raise ConfigError(f"{name} is not set; give --{name.replace('_', '-')}, or see --help")
            return msgspec.convert(given, cls, strict=False)
        except (msgspec.MsgspecError, InputError) as error:
            parser.error(str(error))


def engine_fields(settings: Settings) -> dict[str, Any]:
    """The fields of ControlSettings that the tree of all settings holds; without those it leaves open.

    Raises: ModelFolderError for a model that is neither a folder nor the name of one that ships.
    """
    fields: dict[str, Any] = {
        **settings.engine.model_dump(),
        "data_dir": str(settings.data_dir),
        "log_level": settings.log_level,
        "log_format": settings.log_format,
    }
    if settings.model:
        fields["model"] = str(resolve_model_folder(settings.model))
    for name in ("api_address", "rank_address"):
        if not fields[name]:
            del fields[name]
    return fields


def _parser(cls: type[ControlSettings], program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program,
        usage=f"{program} --api-address ipc://PATH --model FOLDER [more flags; see --help]",
        description="Every flag is one field of ControlSettings; `dist-attn config show` lists the settings.",
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file with settings")
    for name, default in _defaults(cls).items():
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            metavar="VALUE",
            choices=get_args(CHOICES[name]) if name in CHOICES else None,
            help="needed, here or in the settings" if default is msgspec.NODEFAULT else f"default: {default!r}",
        )
    return parser


def _defaults(cls: type[ControlSettings]) -> dict[str, object]:
    """Every field and its default, msgspec.NODEFAULT for one that must be given."""
    return {field.name: field.default for field in msgspec.structs.fields(cls)}


def threads_for(ranks: int) -> int:
    """Compute threads of each of `ranks` on this machine: an even share of the cores this process may use.

    More threads than cores wait for each other by spinning: ten times slower, not a little.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // ranks)
