"""What each exchange between ranks moves and how long it takes, as `dist_attn.comm` performs and counts them.

Bytes are payload that one rank sends, as in `comm.traffic`. P is the number of ranks, |x| the bytes of a rank's tensor.
The scans over ranks are in `costs.scans`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

TOKEN_BYTES = 4
ONE_STEP_BYTES = 64 * 1024  # up to here an all-reduce is one all-gather


@dataclass(frozen=True)
class Link:
    """What a message between two ranks costs: latency_s + bytes / bytes_per_s (the alpha-beta model)."""

    latency_s: float
    bytes_per_s: float


def all_gather_bytes(message_bytes: int, ranks: int) -> int:
    """(P - 1) |x|."""
    return (ranks - 1) * message_bytes


def all_gather_seconds(message_bytes: int, ranks: int, link: Link) -> float:
    """(P - 1) (latency + |x| / bandwidth): a ring of P - 1 steps, as gloo and NCCL do it."""
    return (ranks - 1) * (link.latency_s + message_bytes / link.bytes_per_s)


def all_reduce_bytes(elements: int, element_bytes: int, ranks: int) -> int:
    """(P - 1) |x| in one step up to 64 KiB; 2 (P - 1) ceil(n / P) elements in two steps above."""
    if elements * element_bytes <= ONE_STEP_BYTES:
        return (ranks - 1) * elements * element_bytes
    return 2 * (ranks - 1) * -(-elements // ranks) * element_bytes


def reduce_scatter_bytes(message_bytes: int, ranks: int) -> int:
    """(P - 1) / P of |x|, which holds one row per rank."""
    return (ranks - 1) * (message_bytes // ranks)


def all_to_all_bytes(send_counts: Sequence[int], row_bytes: int, rank: int) -> int:
    """The rows that go to other ranks."""
    return (sum(send_counts) - send_counts[rank]) * row_bytes


def broadcast_bytes(message_bytes: int, ranks: int, *, is_source: bool) -> int:
    """(P - 1) |x| from the source, nothing from the others."""
    return (ranks - 1) * message_bytes if is_source else 0


def handing_seconds(ranks: int, block_tokens: int, row_bytes: int, link: Link) -> float:
    """How long a block's tokens take from rank 0 to the ranks, and the rows' pieces from the ranks back to rank 0.

    Two broadcasts of ceil(log2 P) steps, the second with P L tokens; P - 1 messages each of counts, ranges and rows.
    `block_tokens` is L, `row_bytes` what one rank sends back. One rank hands nothing to anybody.
    """
    if ranks == 1:
        return 0.0
    steps = (ranks - 1).bit_length()
    tokens_s = steps * (2 * link.latency_s + TOKEN_BYTES * ranks * block_tokens / link.bytes_per_s)
    return tokens_s + (ranks - 1) * (3 * link.latency_s + row_bytes / link.bytes_per_s)
