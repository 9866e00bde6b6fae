"""The choice of the fastest exchange for a scan over ranks: measured times in the user's cache, else a rule.

`dist-attn doctor --measure` measures and writes them.
"""

import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from dist_attn.model_config.figures import ScanMessage, takes_turns
from dist_attn.shipped.folder_files import put_in_place
from dist_attn.wire.choices import StateExchange

# Up to so many ranks one all-gather is the fewest steps on a fast link; more ranks need log2 P steps or two levels.
GATHER_RANKS = 8
# MPI combines states in fewer steps than messages between pairs do, by an operator in Python that larger ones wait for.
EXSCAN_BYTES = 1 << 20


def timed_exchanges(ranks: int, backend: str) -> list[StateExchange]:
    """The exchanges that `doctor --measure` times on one host: two ranks may also swap, and MPI has its own scan."""
    names: list[StateExchange] = ["gather", "log_step", "pipelined_ring"]
    if ranks == 2:
        names.append("pair")
    if backend == "mpi":
        names.append("exscan")
    return names


@dataclass(frozen=True)
class ScanTime:
    """The time of one exchange. Units: seconds, the median of several; bytes of one rank's element."""

    backend: str
    ranks: int
    algorithm: str
    message_bytes: int
    seconds: float


@dataclass(frozen=True)
class Calibration:
    """The measured times; where there are none, the rule of thumb decides."""

    times: tuple[ScanTime, ...] = ()

    def choose(self, backend: str, ranks: int, message_bytes: int, hosts: Sequence[Sequence[int]] = ()) -> str:
        """Choose the exchange measured fastest for as many ranks and about this size; over several hosts, the rule's.

        Entries that cannot have been measured count for nothing: a file may be of another version, or edited.
        """
        known = timed_exchanges(ranks, backend)
        measured = [
            t
            for t in self.times
            if t.backend == backend and t.ranks == ranks and t.algorithm in known and t.message_bytes > 0
        ]
        if not measured or len(hosts) > 1 or message_bytes <= 0:
            return default_exchange(ranks, hosts, backend, message_bytes)
        nearest = min(measured, key=lambda t: abs(math.log(t.message_bytes / message_bytes))).message_bytes
        return min((t for t in measured if t.message_bytes == nearest), key=lambda t: t.seconds).algorithm

    def with_times(self, times: Sequence[ScanTime]) -> "Calibration":
        """Replace older times of the same back end and number of ranks with these."""
        new = {(t.backend, t.ranks) for t in times}
        return Calibration((*(t for t in self.times if (t.backend, t.ranks) not in new), *times))

    def to_json(self) -> str:
        """Encode the times as they stand in the file."""
        return msgspec.json.encode(self).decode()

    @staticmethod
    def from_json(text: str) -> "Calibration":
        """Decode a file; there are no times when it is not a calibration, which is only ever a hint."""
        try:
            return msgspec.json.decode(text, type=Calibration)
        except (msgspec.DecodeError, RecursionError):
            return Calibration()

    def write(self, file: Path) -> None:
        """Write the times where `read_calibration` finds them, whole or not at all."""
        file.parent.mkdir(parents=True, exist_ok=True)
        put_in_place(file, self.to_json().encode())


def default_exchange(
    ranks: int, hosts: Sequence[Sequence[int]] = (), backend: str = "", message_bytes: int | None = None
) -> str:
    """Choose a swap for a pair, one all-gather for a few ranks, two levels for many on several hosts, else log steps.

    Many ranks of MPI on one level leave states of up to 1 MiB to MPI's own scan.
    """
    if ranks == 2:
        return "pair"
    if ranks <= GATHER_RANKS:
        return "gather"
    if 1 < len(hosts) < ranks and [rank for host in hosts for rank in host] == list(range(ranks)):
        return "two_level"
    return "exscan" if backend == "mpi" and message_bytes is not None and message_bytes <= EXSCAN_BYTES else "log_step"


def usual_exchange(message: ScanMessage, ranks: int) -> str:
    """The way of a state where nothing else is asked for: in turn, or by the rule of thumb for scans."""
    if takes_turns(ranks, message.heads, erases=message.erases):
        return "in_turn"
    return default_exchange(ranks)


def calibration_file(environ: Mapping[str, str]) -> Path:
    """The file of measured times: in $XDG_CACHE_HOME, else ~/.cache; of users without a home, among temporary files."""
    cache = environ.get("XDG_CACHE_HOME")
    home = Path(environ.get("HOME") or os.path.expanduser("~"))
    if not cache and not home.is_absolute():
        return Path(tempfile.gettempdir()) / f"dist-attn-{os.getuid()}" / "exchanges.json"
    return (Path(cache) if cache else home / ".cache") / "dist-attn" / "exchanges.json"


def read_calibration(file: Path) -> Calibration:
    """Read the measured times; none when there is no such file or it cannot be read."""
    try:
        return Calibration.from_json(file.read_text())
    except (OSError, UnicodeDecodeError):
        return Calibration()
