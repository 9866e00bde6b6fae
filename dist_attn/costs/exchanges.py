"""The bytes and times of exchanges between ranks, as `dist_attn.comm` and `dist_attn.sharded` perform them.

Bytes are payload that one rank sends, forward, as in `comm.traffic`; backward is the transposed exchange. P is the
number of ranks, |x| the bytes of a rank's tensor. `numbers_bytes` are those of one token in one column: B times the
size of an element for channels.

A message of a scan over ranks (`dist_attn.sharded.prefix_scan`) is a row of N sums with their log decay for each of
`groups` batch elements x heads: N = M V + M + 1 for kernel attention. |x| = groups (N + 1) element bytes.

Letters: B batch, L tokens of a rank, D channels, H heads, K taps, M features, V values, P ranks, R ranks of a host.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from dist_attn.errors import ConfigError
from dist_attn.model_config.figures import ScanMessage

TOKEN_BYTES = 4
ONE_STEP_BYTES = 64 * 1024  # up to here an all-reduce is one all-gather


@dataclass(frozen=True)
class Link:
    """The cost of a message between two ranks: latency_s + bytes / bytes_per_s (the alpha-beta model)."""

    latency_s: float
    bytes_per_s: float


def all_gather_bytes(message_bytes: int, ranks: int) -> int:
    """The bytes that a rank sends in an all-gather: (P - 1) |x|."""
    return (ranks - 1) * message_bytes


def all_gather_seconds(message_bytes: int, ranks: int, link: Link) -> float:
    """The seconds of an all-gather: (P - 1) (latency + |x| / bandwidth), a ring of P - 1 steps as in gloo and NCCL."""
    return (ranks - 1) * (link.latency_s + message_bytes / link.bytes_per_s)


def all_reduce_bytes(elements: int, element_bytes: int, ranks: int) -> int:
    """The bytes of an all-reduce: (P - 1) |x| in one step up to 64 KiB; above, 2 (P - 1) ceil(n / P) numbers in two."""
    if elements * element_bytes <= ONE_STEP_BYTES:
        return (ranks - 1) * elements * element_bytes
    return 2 * (ranks - 1) * -(-elements // ranks) * element_bytes


def handing_seconds(ranks: int, block_tokens: int, row_bytes: int, link: Link) -> float:
    """The seconds for a block's tokens from rank 0 to the ranks, and for the rows' pieces from the ranks to rank 0.

    Two broadcasts of ceil(log2 P) steps, the second with P L tokens; P - 1 messages each of counts, ranges and rows.
    `block_tokens` is L, `row_bytes` what one rank sends back. One rank hands nothing to anybody.
    """
    if ranks == 1:
        return 0.0
    steps = (ranks - 1).bit_length()
    tokens_s = steps * (2 * link.latency_s + TOKEN_BYTES * ranks * block_tokens / link.bytes_per_s)
    return tokens_s + (ranks - 1) * (3 * link.latency_s + row_bytes / link.bytes_per_s)


def reshuffle_bytes(lengths: Sequence[int], columns: int, numbers_bytes: int, rank: int) -> int:
    """The bytes from tokens to columns: L local tokens of the columns that other ranks take."""
    return lengths[rank] * (columns - _own_columns(columns, len(lengths), rank)) * numbers_bytes


def reshuffle_back_bytes(lengths: Sequence[int], columns: int, numbers_bytes: int, rank: int) -> int:
    """The bytes from columns to tokens: the other ranks' tokens of this rank's columns."""
    return (sum(lengths) - lengths[rank]) * _own_columns(columns, len(lengths), rank) * numbers_bytes


def halo_bytes(batch: int, channels: int, taps: int, ranks: int, *, real_bytes: int = 4) -> int:
    """The bytes of (P - 1) (K - 1) B D numbers: edge tokens of a short convolution, causal, centred or streaming."""
    return all_gather_bytes(real_bytes * batch * (taps - 1) * channels, ranks)


def _own_columns(columns: int, ranks: int, rank: int) -> int:
    share, extra = divmod(columns, ranks)
    return share + (rank < extra)


@dataclass(frozen=True)
class ScanCost:
    """The cost to one rank of sending in a scan. Units: bytes, messages."""

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
    """The cost of what `rank` sends forward; |x| is the bytes of its element.

    pair            |x|.
    gather          (P - 1) |x|.
    exscan          |x|, (P - 1) |x| from the last rank; between MPI's ranks the library's own messages are more.
    log_step        |x| in each step k in which rank ^ 2^k is a rank; from the last, (P - 1) |x| more unless P = 2^n.
    serial_ring     |x|, (P - 1) |x| from the last rank.
    pipelined_ring  `pieces` pieces up to this rank and, but for the two ranks before the end, as many of the total.
    two_level       (R - 1) |x| in the host, a piece for each other host, two pieces for each neighbour.
    in_turn         the state S of |x| to the next rank, head by head; (P - 1) |S| from the last rank.

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
    if algorithm == "in_turn":
        return ScanCost((last or 1) * message.state_bytes, last or message.heads)
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
    """The seconds of the longest chain of messages that wait for each other; a rank sends one after the other.

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
    if algorithm == "in_turn":  # the last head's state, and the last rank's of all heads
        return (ranks + message.heads - 2) * seconds(message.state_bytes // message.heads) + rounds * seconds(
            message.state_bytes
        )
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
