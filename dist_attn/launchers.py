"""Launchers of ranks: how torchrun and mpiexec (MPICH, Open MPI, PMIx) tell a process its rank, where mpiexec is, and
the signals by which they, or a person, ask a run to stop.
"""

import contextlib
import importlib.util
import os
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import final

from dist_attn.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Launch:
    """The start of this process: its launcher, its rank and the number of ranks; None stands for what was not said."""

    launcher: str
    rank_variable: str
    size_variable: str
    rank: int | None
    size: int | None


# torchrun first: under an mpiexec that starts torchrun, the ranks are torchrun's. PMIx does not tell the size.
_DIALECTS = (
    ("torchrun", "RANK", "WORLD_SIZE"),
    ("mpiexec", "PMI_RANK", "PMI_SIZE"),
    ("mpiexec", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("mpiexec", "PMIX_RANK", ""),
)


# The variables by which gloo, NCCL, and MPICH's UCX and libfabric know the interface on which they listen.
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "UCX_NET_DEVICES", "FI_TCP_IFACE")
LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"

# The variable that names the meeting place, as a file's URL, of ranks that `--ranks` of a command has started.
MEETING_VARIABLE = "DIST_ATTN_MEETING"


def read_launch(environ: Mapping[str, str]) -> Launch | None:
    """Read how this process was started; None when no launcher left a word.

    Raises: ConfigError for a rank or a number of ranks that cannot be read.
    """
    for launcher, rank_variable, size_variable in _DIALECTS:
        if rank_variable in environ or size_variable in environ:
            rank = _number(environ, rank_variable, 0, "the number of this rank, 0 or more")
            size = _number(environ, size_variable, 1, "the number of ranks, 1 or more")
            return Launch(launcher, rank_variable, size_variable, rank, size)
    return None


def is_first_rank(environ: Mapping[str, str]) -> bool:
    """Return whether this process is alone or rank 0, the one that speaks for all; it never fails."""
    return all(environ.get(rank_variable, "0") == "0" for _, rank_variable, _ in _DIALECTS)


# torchrun, MPICH, Open MPI, Slurm; last MPICH's gforker, which starts ranks of one host only and counts no other way.
_OF_HOST = (
    ("LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("SLURM_LOCALID", ""),
    ("PMI_RANK", "PMI_SIZE"),
)


def place_on_host(environ: Mapping[str, str]) -> tuple[int, int] | None:
    """The number of this process among those of its host, and how many there are (0: not known), as launchers say."""
    for rank_variable, size_variable in _OF_HOST:
        rank, size = environ.get(rank_variable, ""), environ.get(size_variable, "")
        if rank.isdecimal():
            return int(rank), int(size) if size.isdecimal() else 0
    return None


def find_mpiexec(*, one_host: bool = False) -> str | None:
    """Find MPI's launcher, first beside this Python, where wheels put theirs.

    For ranks of `one_host` MPICH's gforker comes first, where it is installed: it listens on no port, while hydra, the
    usual launcher of MPICH, listens on all addresses and admits every connection.
    """
    places = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    mpiexec = shutil.which("mpiexec", path=os.pathsep.join(places))
    if mpiexec is not None and one_host:
        return shutil.which("mpiexec.gforker", path=str(Path(mpiexec).parent)) or mpiexec
    return mpiexec


def lacks_for_mpi() -> list[str]:
    """The parts that ranks over MPI need and that are not installed; nothing is loaded."""
    absent = ["mpi4py"] if importlib.util.find_spec("mpi4py") is None else []
    return absent + (["mpiexec"] if find_mpiexec() is None else [])


def _number(environ: Mapping[str, str], name: str, lowest: int, what: str) -> int | None:
    text = environ.get(name)
    if text is None:
        return None
    if not text.isdecimal() or int(text) < lowest:
        raise ConfigError(f"{name} is {text!r}; it must be {what}")
    return int(text)


@contextlib.contextmanager
def ended_in_order() -> Iterator[None]:
    """Let SIGTERM, which launchers send to all ranks when one fails, unwind the work as Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


SIGNALS = (signal.SIGINT, signal.SIGTERM)


@final
class StopRequest:
    """A request to stop the run, with the signal that made it."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def __call__(self) -> bool:
        """Return whether to stop after this step."""
        return self.signal is not None


@contextlib.contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Take the first SIGINT or SIGTERM inside as a request to stop; a second one does what it did outside.

    Only the main thread may enter.
    """
    request = StopRequest()
    before = {number: signal.getsignal(number) for number in SIGNALS}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def ask(number: int, frame: FrameType | None) -> None:
        request.signal = signal.Signals(number)
        restore()

    for number in SIGNALS:
        signal.signal(number, ask)
    try:
        yield request
    finally:
        restore()
