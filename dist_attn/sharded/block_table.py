"""Tables of the rectangles of a 1-D or 2-D tensor that each rank holds: any cut into blocks, in integers only."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, pairwise, product
from math import prod

from dist_attn.errors import InputError

__all__ = ["TableBlock", "BlockTable", "Range", "overlap"]

Range = tuple[int, int]


@dataclass(frozen=True)
class TableBlock:
    """A part of a tensor and the rank that holds it: one [start, stop) for each dimension."""

    rank: int
    ranges: tuple[Range, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Its size in each dimension."""
        return tuple(stop - start for start, stop in self.ranges)

    @property
    def elements(self) -> int:
        """The number of elements."""
        return prod(self.shape)


@dataclass(frozen=True)
class BlockTable:
    """The blocks of a tensor of `shape`. A rank keeps its blocks one after the other, each in row-major order.

    Blocks may overlap in a table that is a target: each then holds a copy. A source must be a `partition`.

    Raises: InputError for other than one or two dimensions, or a block that is not inside the tensor or on no rank.
    """

    shape: tuple[int, ...]
    ranks: int
    blocks: tuple[TableBlock, ...]

    def __post_init__(self) -> None:
        if len(self.shape) not in (1, 2) or self.ranks < 1:
            raise InputError(
                f"a table of shape {self.shape} over {self.ranks} ranks; needed: 1 or 2 dimensions, a rank"
            )
        for block in self.blocks:
            inside = len(block.ranges) == len(self.shape) and all(
                0 <= start <= stop <= size for (start, stop), size in zip(block.ranges, self.shape, strict=True)
            )
            if not inside or not 0 <= block.rank < self.ranks:
                raise InputError(
                    f"{block} does not fit into a tensor of shape {self.shape} over {self.ranks} ranks; give "
                    "[start, stop) inside it for each dimension and a rank that exists"
                )

    @classmethod
    def grid(cls, cuts: Sequence[Sequence[int]], owners: Sequence[int], ranks: int) -> "BlockTable":
        """The table cut at `cuts` in each dimension; `owners` are the ranks of its blocks in row-major order.

        Raises: InputError where cuts do not start at 0 or fall, or where there is not one owner for each block.
        """
        if any(len(c) < 2 or c[0] != 0 or any(a > b for a, b in pairwise(c)) for c in cuts):
            raise InputError(f"cuts {list(map(list, cuts))} must start at 0 and never fall in each dimension")
        ranges = list(product(*(tuple(pairwise(c)) for c in cuts)))
        if len(ranges) != len(owners):
            raise InputError(f"{len(owners)} owners for {len(ranges)} blocks; give the rank of each block")
        blocks = (TableBlock(rank, block) for rank, block in zip(owners, ranges, strict=True))
        return cls(tuple(c[-1] for c in cuts), ranks, tuple(blocks))

    def of(self, rank: int) -> tuple[TableBlock, ...]:
        """The blocks of `rank`, in the order in which it keeps them."""
        return tuple(block for block in self.blocks if block.rank == rank)

    def elements(self, rank: int) -> int:
        """The number of elements that `rank` keeps."""
        return sum(block.elements for block in self.of(rank))

    @cached_property
    def partition(self) -> bool:
        """Return whether every element lies in exactly one block."""
        filled = [block.ranges for block in self.blocks if block.elements]
        apart = all(overlap(a, b) is None for a, b in combinations(filled, 2))
        return apart and sum(block.elements for block in self.blocks) == prod(self.shape)

    def relabelled(self, players: Sequence[int]) -> "BlockTable":
        """Rename the ranks of the blocks: `players[rank]` stands for `rank`."""
        return BlockTable(self.shape, self.ranks, tuple(TableBlock(players[b.rank], b.ranges) for b in self.blocks))


def overlap(a: Iterable[Range], b: Iterable[Range]) -> tuple[Range, ...] | None:
    """The ranges that two blocks have in common; None where they have nothing."""
    common = tuple((max(p[0], q[0]), min(p[1], q[1])) for p, q in zip(a, b, strict=True))
    return common if all(start < stop for start, stop in common) else None
