"""What each exchange of the scan over ranks sends, in how many messages and steps, and how long it takes.

A message is a row of N sums with their log decay for each of `groups` batch elements x heads: N = M V + M + 1 for
kernel attention. |x| = groups (N + 1) element bytes. The exchanges themselves are in `dist_attn.sharded.prefix_scan`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from dist_attn.costs.exchanges import Link
from dist_attn.errors import ConfigError
from dist_attn.model_config.figures import ScanMessage


@dataclass(frozen=True)
class ScanCost:
    """What one rank sends in a scan. Units: bytes, messages."""

    bytes_sent: int
    messages: int


def scan_cost(
    algorithm: str,
    message: ScanMessage,
    ranks: int,
    rank: int,
    *,
    pieces: int = 4,
    hosts: Sequence[Sequence[int]] = (),
) -> ScanCost:
    """What `rank` sends forward; the formulas stand with the algorithms.

    pair            |x|.
    gather          (P - 1) |x|.
    exscan          |x|, (P - 1) |x| from the last rank; between MPI's ranks the library's own messages are more.
    log_step        |x| in each step k in which rank ^ 2^k is a rank; from the last, (P - 1) |x| more unless P = 2^n.
    serial_ring     |x|, (P - 1) |x| from the last rank.
    pipelined_ring  `pieces` pieces up to this rank and, but for the two ranks before the end, as many of the total.
    two_level       (R - 1) |x| in the host, a piece for each other host, two pieces for each neighbour.

    Raises: ConfigError for an unknown algorithm.
    """
    whole = message.bytes
    if ranks == 1:
        return ScanCost(0, 0)
    if algorithm == "pair":
        return ScanCost(whole, 1)
    if algorithm == "gather":
        return ScanCost((ranks - 1) * whole, ranks - 1)
    last = ranks - 1 if rank == ranks - 1 else 0
    if algorithm == "log_step":
        swaps = sum(rank ^ (1 << step) < ranks for step in range((ranks - 1).bit_length()))
        spread = last if ranks & (ranks - 1) else 0
        return ScanCost((swaps + spread) * whole, swaps + spread)
    if algorithm in ("exscan", "serial_ring"):
        count = last or 1
        return ScanCost(count * whole, count)
    if algorithm == "pipelined_ring":
        pieces = message.most_pieces(pieces)
        up_to = set(range(rank, rank + pieces))
        total = set(range(ranks + rank, ranks + rank + pieces)) if rank < ranks - 2 else set()
        return ScanCost((len(up_to) + len(total)) * message.piece_bytes(pieces), len(up_to | total))
    if algorithm == "two_level":
        return _two_level(message, rank, hosts)
    raise ConfigError(f"there is no formula for the exchange {algorithm!r}")


def scan_seconds(
    algorithm: str,
    message: ScanMessage,
    ranks: int,
    link: Link,
    *,
    pieces: int = 4,
    hosts: Sequence[Sequence[int]] = (),
    between_hosts: Link | None = None,
) -> float:
    """The longest chain of messages that wait for each other; a rank sends one after the other.

    `link` joins the ranks of a host; where there are `hosts`, `between_hosts` joins these, and a flat exchange is as
    slow as that.
    """
    if ranks == 1:
        return 0.0
    slow = link if between_hosts is None or len(hosts) < 2 else between_hosts

    def seconds(size: int, over: Link = slow) -> float:
        return over.latency_s + size / over.bytes_per_s

    rounds = (ranks - 1).bit_length()
    if algorithm == "pair":
        return seconds(message.bytes)
    if algorithm == "gather":
        return (ranks - 1) * seconds(message.bytes)
    if algorithm == "log_step":
        return (rounds if ranks & (ranks - 1) == 0 else 2 * rounds) * seconds(message.bytes)
    if algorithm == "exscan":  # as over MPI; other back ends have the steps of the serial ring
        return 2 * rounds * seconds(message.bytes)
    if algorithm == "serial_ring":
        return (ranks - 1 + rounds) * seconds(message.bytes)
    if algorithm == "pipelined_ring":
        pieces = message.most_pieces(pieces)
        return (2 * ranks + pieces - 3) * seconds(message.piece_bytes(pieces))
    if algorithm == "two_level":
        largest, lanes = max(len(host) for host in hosts), message.most_pieces(min(len(host) for host in hosts))
        part = message.piece_bytes(lanes)
        inside = (largest - 1) * (seconds(message.bytes, link) + seconds(2 * part, link))
        return inside + (len(hosts) - 1) * seconds(part)
    raise ConfigError(f"there is no formula for the exchange {algorithm!r}")


def _two_level(message: ScanMessage, rank: int, hosts: Sequence[Sequence[int]]) -> ScanCost:
    host = next(host for host in hosts if rank in host)
    lanes = message.most_pieces(min(len(host) for host in hosts))
    neighbours, part = len(host) - 1, message.piece_bytes(lanes)
    carries = host.index(rank) < lanes
    others = len(hosts) - 1 if carries else 0
    results = neighbours if carries else 0
    return ScanCost(
        neighbours * message.bytes + others * part + 2 * results * part,
        neighbours + others + results,
    )
