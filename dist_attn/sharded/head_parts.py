"""Who computes what in attention whose heads are spread over ranks: heads x queries in equal parts, in integers only.

The key heads lie on a line that is cut into P equal parts. A cut inside a head divides its queries, so that any number
of heads over any number of ranks is even work: fewer heads than ranks, and numbers that do not divide. When causal,
the queries of such a head are folded first, query t with query L - 1 - t, since late queries see more keys than early
ones.
"""

from dataclasses import dataclass
from functools import lru_cache

from dist_attn.sharded.block_table import Range

__all__ = ["HeadPart", "head_parts"]


@dataclass(frozen=True)
class HeadPart:
    """These ranges of queries, over these keys, of all key heads in a range and the query heads that read them."""

    heads: Range
    queries: tuple[Range, ...]
    keys: Range

    @property
    def whole(self) -> bool:
        """Whether the queries start at the first and have no gap, as kernels for whole sequences need them."""
        return len(self.queries) == 1 and self.queries[0][0] == 0


@lru_cache(maxsize=128)
def head_parts(heads: int, queries: int, keys: int, ranks: int, *, causal: bool) -> tuple[tuple[HeadPart, ...], ...]:
    """The parts of each rank: at most one range of whole heads, and a share of a head before and after it."""
    return tuple(
        tuple(_parts(heads, queries, keys, ranks, causal, rank * heads, (rank + 1) * heads)) for rank in range(ranks)
    )


def _parts(heads: int, queries: int, keys: int, ranks: int, causal: bool, start: int, stop: int) -> list[HeadPart]:
    """The parts of [start, stop), in units of 1 / ranks of a head."""
    first, last = -(-start // ranks), stop // ranks
    found: list[tuple[Range, tuple[Range, ...]]] = []
    if first > last:  # inside one head
        found.append(((last, first), _share(queries, start - last * ranks, stop - last * ranks, ranks, causal)))
    else:
        found.append(((first - 1, first), _share(queries, start - (first - 1) * ranks, ranks, ranks, causal)))
        found.append(((first, last), ((0, queries),) if queries else ()))
        found.append(((last, last + 1), _share(queries, 0, stop - last * ranks, ranks, causal)))
    parts = []
    for of_heads, of_queries in found:
        if of_queries and of_heads[0] < of_heads[1]:
            seen = min(keys, of_queries[-1][1]) if causal else keys
            parts.append(HeadPart(of_heads, of_queries, (0, seen)))
    return parts


def _share(queries: int, start: int, stop: int, of: int, causal: bool) -> tuple[Range, ...]:
    """The queries in [start, stop) / of of a head, in order; nothing where that is no query."""
    folded = -(-queries // 2) if causal else queries
    a, b = ((edge * folded + of // 2) // of for edge in (start, stop))
    if not causal:
        ranges = [(a, b)]
    elif b == folded:
        ranges = [(a, queries - a)]  # the two halves touch in the middle
    else:
        ranges = [(a, b), (queries - b, queries - a)]
    return tuple((first, last) for first, last in ranges if first < last)
