"""Plans to move tensors from any block tables to any others with the least traffic: pieces, messages, players.

The ranks of a target table are parts to be played; which rank plays which part is free, and is chosen by a linear
assignment such that as many numbers as possible stay where they are.

Reference: Kabic et al., COSTA: Communication-Optimal Shuffle and Transpose Algorithm with Process Relabeling, Sec. 3
and 4.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod

from dist_attn.errors import InputError
from dist_attn.sharded.block_table import BlockTable, Range, TableBlock, overlap

__all__ = ["Change", "SentPiece", "RedistributionPlan", "plan_redistribution"]

PLANS_KEPT = 128


@dataclass(frozen=True)
class Change:
    """One tensor: its table now and then, the numbers at each element, and what happens to them on the way.

    With `transpose` the target is a table of the transposed tensor.

    Raises: InputError for tables of other shapes or numbers of ranks, or a source that is not a partition.
    """

    source: BlockTable
    target: BlockTable
    numbers: int = 1
    transpose: bool = False
    scale: float = 1.0

    def __post_init__(self) -> None:
        wanted = self.source.shape[::-1] if self.transpose else self.source.shape
        if self.target.shape != wanted or self.target.ranks != self.source.ranks or self.numbers < 0:
            raise InputError(
                f"from a tensor of shape {self.source.shape} over {self.source.ranks} ranks "
                f"{'transposed ' * self.transpose}to one of {self.target.shape} over {self.target.ranks}, "
                f"{self.numbers} numbers each; both need the same elements and ranks"
            )
        if not self.source.partition:
            raise InputError("the blocks of the source overlap or leave something out; each element needs one block")


@dataclass(frozen=True)
class SentPiece:
    """The overlap of one block of the sender and one of the receiver; ranges count from the blocks' corners.

    `source` and `target` are places among the blocks of the sender's and of the receiver's table.
    """

    change: int
    source: int
    target: int
    source_ranges: tuple[Range, ...]
    target_ranges: tuple[Range, ...]
    elements: int


@dataclass(frozen=True)
class RedistributionPlan:
    """The messages from every rank to every other: one for each pair that has anything to say to each other.

    `players[part]` is the rank that plays the part of the target tables; `targets` are the tables it leads to.
    `pieces[sender][receiver]` is in the order in which they lie in the message.
    """

    changes: tuple[Change, ...]
    players: tuple[int, ...]
    targets: tuple[BlockTable, ...]
    pieces: tuple[tuple[tuple[SentPiece, ...], ...], ...]

    @property
    def ranks(self) -> int:
        """The number of ranks that take part."""
        return len(self.players)

    def sends(self, rank: int) -> list[int]:
        """Numbers that `rank` sends to each rank, itself included."""
        return [self._numbers(pieces) for pieces in self.pieces[rank]]

    def receives(self, rank: int) -> list[int]:
        """Numbers that `rank` receives from each rank, itself included."""
        return [self._numbers(of_sender[rank]) for of_sender in self.pieces]

    @property
    def traffic(self) -> int:
        """Numbers that change rank, in all."""
        return sum(sum(self.sends(rank)) - self.sends(rank)[rank] for rank in range(self.ranks))

    @property
    def messages(self) -> int:
        """Messages between different ranks, in all."""
        pairs = ((s, r) for s in range(self.ranks) for r in range(self.ranks) if s != r)
        return sum(self._numbers(self.pieces[s][r]) > 0 for s, r in pairs)

    @cached_property
    def adjoint(self) -> "RedistributionPlan":
        """The way back, which is also that of the gradients: copies add up."""
        changes = tuple(
            _Unchecked(target, c.source, c.numbers, c.transpose, c.scale)
            for c, target in zip(self.changes, self.targets, strict=True)
        )
        pieces = tuple(
            tuple(
                tuple(
                    SentPiece(p.change, p.target, p.source, p.target_ranges, p.source_ranges, p.elements)
                    for p in self.pieces[sender][receiver]
                )
                for sender in range(self.ranks)
            )
            for receiver in range(self.ranks)
        )
        sources = tuple(change.source for change in self.changes)
        return RedistributionPlan(changes, tuple(range(self.ranks)), sources, pieces)

    def _numbers(self, pieces: Sequence[SentPiece]) -> int:
        return sum(piece.elements * self.changes[piece.change].numbers for piece in pieces)


class _Unchecked(Change):
    """The change of a way back, whose source may hold copies."""

    def __post_init__(self) -> None:
        pass


@lru_cache(maxsize=PLANS_KEPT)
def plan_redistribution(changes: tuple[Change, ...], *, relabel: bool = True) -> RedistributionPlan:
    """The plan with the least traffic for all tensors together; without `relabel`, every rank plays its own part.

    A relabelling that saves nothing is not made.
    Cost: one look at each pair of a source and a target block; the assignment takes O(P^3). Plans are kept.
    Raises: InputError for no changes, or changes over different numbers of ranks.
    """
    if len({change.source.ranks for change in changes}) != 1:
        raise InputError("a redistribution needs one tensor or more, all over the same ranks")
    ranks = changes[0].source.ranks
    kept = [[0] * ranks for _ in range(ranks)]
    found: list[tuple[int, int, SentPiece]] = []
    for number, change in enumerate(changes):
        source_places, target_places = _places(change.source), _places(change.target)
        for s, source in enumerate(change.source.blocks):
            for t, target in enumerate(change.target.blocks):
                piece = _piece(number, change, source, target, source_places[s], target_places[t])
                if piece is not None:
                    found.append((source.rank, target.rank, piece))
                    kept[source.rank][target.rank] += piece.elements * change.numbers
    players = _players(kept) if relabel else tuple(range(ranks))
    pieces: list[list[list[SentPiece]]] = [[[] for _ in range(ranks)] for _ in range(ranks)]
    for sender, part, piece in found:
        pieces[sender][players[part]].append(piece)
    return RedistributionPlan(
        changes,
        players,
        tuple(change.target.relabelled(players) for change in changes),
        tuple(tuple(tuple(of_pair) for of_pair in of_sender) for of_sender in pieces),
    )


def _places(table: BlockTable) -> list[int]:
    """The place of each block of the table among those of its rank."""
    seen: dict[int, int] = {}
    places = []
    for block in table.blocks:
        places.append(seen.get(block.rank, 0))
        seen[block.rank] = places[-1] + 1
    return places


def _piece(
    number: int, change: Change, source: TableBlock, target: TableBlock, source_place: int, target_place: int
) -> SentPiece | None:
    flip = -1 if change.transpose else 1
    common = overlap(source.ranges, target.ranges[::flip])
    if common is None:
        return None
    return SentPiece(
        number,
        source_place,
        target_place,
        _inside(common, source.ranges),
        _inside(common[::flip], target.ranges),
        prod(stop - start for start, stop in common),
    )


def _inside(ranges: Sequence[Range], block: Sequence[Range]) -> tuple[Range, ...]:
    return tuple((start - corner, stop - corner) for (start, stop), (corner, _) in zip(ranges, block, strict=True))


def _players(kept: list[list[int]]) -> tuple[int, ...]:
    """Choose the rank that plays each part, so that the most numbers stay; `kept[rank][part]` of them do."""
    # Imported here: a rank that never redistributes need not wait for SciPy to load.
    from scipy.optimize import linear_sum_assignment

    ranks, parts = linear_sum_assignment(kept, maximize=True)
    players = [0] * len(kept)
    for rank, part in zip(ranks.tolist(), parts.tolist(), strict=True):
        players[part] = rank
    best = sum(kept[rank][part] for part, rank in enumerate(players))
    own = sum(kept[rank][rank] for rank in range(len(kept)))
    return tuple(players) if best > own else tuple(range(len(kept)))
