"""Which rank holds which tokens: contiguous global ranges per rank and where documents start, in integers only."""

import hashlib
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from operator import index

from dist_attn.errors import InputError

__all__ = ["SequenceLayout"]


@dataclass(frozen=True)
class SequenceLayout:
    """A sequence of `total` tokens cut into one contiguous range per rank; a range may be empty.

    `cuts` has `size + 1` positions: rank r holds tokens [cuts[r], cuts[r + 1]).
    `documents` holds the global positions at which a document starts (None: one unbroken sequence). Tokens before
    the first start continue the document that the incoming state belongs to, so a stream can be cut into blocks
    anywhere; `documents=(0,)` says that the block begins a document of its own.

    Raises: InputError for cuts or documents that are not sorted whole numbers inside the sequence.
    """

    cuts: tuple[int, ...]
    documents: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "cuts", _whole_numbers("cuts", self.cuts))
        if len(self.cuts) < 2 or self.cuts[0] != 0 or any(a > b for a, b in pairwise(self.cuts)):
            raise InputError(f"cuts {_short(self.cuts)} must start at 0, never fall and hold one more entry than ranks")
        if self.documents is None:
            return
        object.__setattr__(self, "documents", _whole_numbers("documents", self.documents))
        rising = all(a < b for a, b in pairwise(self.documents))
        if not rising or (self.documents and not 0 <= self.documents[0] <= self.documents[-1] < self.total):
            raise InputError(
                f"documents {_short(self.documents)} must be rising start positions in [0, {self.total}): "
                "give where each document starts, not how long it is"
            )

    @classmethod
    def from_lengths(cls, lengths: Iterable[int], documents: Iterable[int] | None = None) -> "SequenceLayout":
        """The layout in which rank r holds the next `lengths[r]` tokens.

        Raises: InputError if there is no rank or a length is negative or not a whole number.
        """
        counts = _whole_numbers("lengths", lengths)
        if not counts or min(counts) < 0:
            raise InputError(f"lengths {_short(counts)} must name at least one rank, each with 0 or more tokens")
        return cls(tuple(accumulate(counts, initial=0)), None if documents is None else tuple(documents))

    @classmethod
    def even(
        cls, total: int, size: int, multiple_of: int = 1, documents: Iterable[int] | None = None
    ) -> "SequenceLayout":
        """The layout that splits `total` tokens most evenly over `size` ranks with every inner cut on the grid.

        Every cut is a multiple of `multiple_of`, or the end of the sequence. Earlier ranks take what is left over,
        so with few tokens the last ranks are empty.

        Raises: InputError unless total >= 0, size >= 1 and multiple_of >= 1.
        """
        total, size, multiple_of = _whole_numbers("total, size and multiple_of", (total, size, multiple_of))
        if total < 0 or size < 1 or multiple_of < 1:
            raise InputError(f"got {total=}, {size=}, {multiple_of=}; needed total >= 0, size >= 1, multiple_of >= 1")
        share, extra = divmod(-(-total // multiple_of), size)
        cuts = (min(total, (rank * share + min(rank, extra)) * multiple_of) for rank in range(size + 1))
        return cls(tuple(cuts), None if documents is None else tuple(documents))

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.cuts) - 1

    @property
    def total(self) -> int:
        """The number of tokens on all ranks together."""
        return self.cuts[-1]

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """The number of tokens of each rank."""
        return tuple(stop - start for start, stop in pairwise(self.cuts))

    def range(self, rank: int) -> tuple[int, int]:
        """The global tokens [start, stop) of `rank`.

        Raises: InputError if there is no such rank.
        """
        if not 0 <= rank < self.size:
            raise InputError(f"rank {rank} is not in this layout of {self.size} ranks; ranks are 0 to {self.size - 1}")
        return self.cuts[rank], self.cuts[rank + 1]

    def rank_of(self, token: int) -> int:
        """The rank that holds the global token.

        Raises: InputError if the token lies outside the sequence.
        """
        if not 0 <= token < self.total:
            raise InputError(f"token {token} is not in this layout of {self.total} tokens")
        return bisect_right(self.cuts, token) - 1

    def document_ranges(self) -> tuple[tuple[int, int], ...]:
        """The global tokens [start, stop) of each document, in order; the first may continue an earlier block."""
        starts = self.documents or ()
        edges = starts if starts[:1] == (0,) else (0, *starts)
        return tuple(pairwise((*edges, self.total))) if self.total else ()

    def documents_on(self, rank: int) -> tuple[int, ...]:
        """The document starts that fall on `rank`, as positions inside its own slice."""
        start, stop = self.range(rank)
        return tuple(position - start for position in self.documents or () if start <= position < stop)

    @cached_property
    def digest(self) -> str:
        """A stable name of this layout (SHA-256, 64 hex digits): equal on two ranks exactly when the layouts are."""
        documents = "none" if self.documents is None else ",".join(map(str, self.documents))
        text = f"sequence-layout/1 cuts={','.join(map(str, self.cuts))} documents={documents}"
        return hashlib.sha256(text.encode("ascii")).hexdigest()


def _whole_numbers(what: str, values: Iterable[int]) -> tuple[int, ...]:
    """The values as plain ints; refuses floats, which would round silently."""
    given = tuple(values)
    try:
        return tuple(index(value) for value in given)
    except TypeError:
        raise InputError(f"{what} {_short(given)} must be whole numbers") from None


def _short(values: Sequence[object]) -> str:
    """At most eight of the values, for messages."""
    tail = f", … ({len(values)} in all)" if len(values) > 8 else ""
    return f"[{', '.join(map(str, values[:8]))}{tail}]"
