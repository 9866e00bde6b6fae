"""The division of a sequence: contiguous ranges of tokens per rank, and the starts of documents, in integers only."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from operator import index

from dist_attn.errors import InputError

__all__ = ["SequenceLayout"]


@dataclass(frozen=True)
class SequenceLayout:
    """A sequence of `total` tokens cut into one contiguous range per rank; a range may be empty.

    `cuts` has `size + 1` positions: rank r holds tokens [cuts[r], cuts[r + 1]), `lengths[r]` in number.
    `documents` holds the global positions at which a document starts (None: one unbroken sequence). Tokens before
    the first start continue the document that the incoming state belongs to, so a stream can be cut into blocks
    anywhere; `documents=(0,)` says that the block begins a document of its own.

    Raises: InputError for cuts or documents that are not sorted whole numbers inside the sequence.
    """

    cuts: tuple[int, ...]
    documents: tuple[int, ...] | None = None
    # Not a cached property: a compiler that traces a model cannot look into the lock of one that is not filled yet.
    lengths: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "cuts", _whole_numbers("cuts", self.cuts))
        if len(self.cuts) < 2 or self.cuts[0] != 0 or any(a > b for a, b in pairwise(self.cuts)):
            raise InputError(f"cuts {_short(self.cuts)} must start at 0, never fall and hold one more entry than ranks")
        object.__setattr__(self, "lengths", tuple(stop - start for start, stop in pairwise(self.cuts)))
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
        """Make the layout in which rank r holds the next `lengths[r]` tokens.

        Raises: InputError if there is no rank or a length is negative or not a whole number.
        """
        counts = _whole_numbers("lengths", lengths)
        if not counts or min(counts) < 0:
            raise InputError(f"lengths {_short(counts)} must name at least one rank, each with 0 or more tokens")
        return cls(tuple(accumulate(counts, initial=0)), None if documents is None else tuple(documents))

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Iterable[int], lengths: Iterable[int]) -> "SequenceLayout":
        """Make the layout of packed documents from their cumulative lengths: 0, n1, n1 + n2, …, the number of tokens.

        Documents without tokens leave no trace.

        Raises: InputError if they do not begin at 0, fall, or do not end at the sum of the ranks' lengths.
        """
        edges, counts = _whole_numbers("cu_seqlens", cu_seqlens), _whole_numbers("lengths", lengths)
        total = sum(counts)
        if edges[:1] != (0,) or edges[-1] != total or any(a > b for a, b in pairwise(edges)):
            raise InputError(
                f"cu_seqlens {_short(edges)} must begin at 0, never fall and end at {total}, the tokens held"
            )
        return cls.from_lengths(counts, sorted({edge for edge in edges if edge < total}))

    @classmethod
    def even(
        cls, total: int, size: int, multiple_of: int = 1, documents: Iterable[int] | None = None
    ) -> "SequenceLayout":
        """Make the layout that splits `total` tokens most evenly over `size` ranks, with every inner cut on the grid.

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

    def range(self, rank: int) -> tuple[int, int]:
        """The global tokens [start, stop) of `rank`.

        Raises: InputError if there is no such rank.
        """
        if not 0 <= rank < self.size:
            raise InputError(f"rank {rank} is not in this layout of {self.size} ranks; ranks are 0 to {self.size - 1}")
        return self.cuts[rank], self.cuts[rank + 1]

    def document_ranges(self) -> tuple[tuple[int, int], ...]:
        """The global tokens [start, stop) of each document, in order; the first may continue an earlier block."""
        starts = self.documents or ()
        edges = starts if starts[:1] == (0,) else (0, *starts)
        return tuple(pairwise((*edges, self.total))) if self.total else ()

    def documents_on(self, rank: int) -> tuple[int, ...]:
        """The document starts that fall on `rank`, as positions inside its own slice."""
        start, stop = self.range(rank)
        starts = self.documents or ()
        return tuple(position - start for position in starts[bisect_left(starts, start) : bisect_left(starts, stop)])

    def document_of(self, token: int) -> int:
        """The number of the document that holds the global token: 0 before the first start, 1 from it on, and so on."""
        return bisect_right(self.documents or (), token)

    def ranks_before(self, rank: int) -> tuple[int, ...]:
        """The earlier ranks that hold tokens of the document of this rank's first token, in order."""
        here = self._document_ends[rank]
        earlier = enumerate(self._document_ends[:rank])
        return tuple(other for other, ends in earlier if here and ends and ends[1] == here[0])

    def ranks_after(self, rank: int) -> tuple[int, ...]:
        """The later ranks that hold tokens of the document of this rank's last token, in order."""
        here = self._document_ends[rank]
        later = enumerate(self._document_ends[rank + 1 :], rank + 1)
        return tuple(other for other, ends in later if here and ends and ends[0] == here[1])

    def ranks_of_last_document(self) -> tuple[int, ...]:
        """The ranks that hold tokens of the last document, in order."""
        last = self.document_of(self.total - 1)
        return tuple(rank for rank, ends in enumerate(self._document_ends) if ends and ends[1] == last)

    @cached_property
    def crosses_cuts(self) -> bool:
        """Return whether any document has tokens on more than one rank."""
        return any(self.ranks_before(rank) for rank in range(self.size))

    def at_ends(self, rank: int) -> tuple[int, int]:
        """This rank's tokens before the first start here, and from the last start on; all of them where none is."""
        length, starts = self.lengths[rank], self.documents_on(rank)
        return (starts[0], length - starts[-1]) if starts else (length, length)

    def pieces(self, rank: int) -> tuple[int, int, int]:
        """Count this rank's tokens of a document of earlier ranks, of none but this rank, and of later ranks.

        Tokens of a document of earlier and later ranks count as the first.
        """
        length, (begun, left) = self.lengths[rank], self.at_ends(rank)
        first = begun if self.ranks_before(rank) else 0
        last = min(left, length - first) if self.ranks_after(rank) else 0
        return first, length - first - last, last

    @cached_property
    def across_cuts(self) -> "SequenceLayout":
        """The layout of those tokens whose document has tokens on more than one rank, in order."""
        lengths: list[int] = []
        starts: list[int] = []
        for rank in range(self.size):
            first, inside, last = self.pieces(rank)
            before = sum(lengths)
            # A new document begins behind the end of one, also where an earlier block's document is left out.
            if last and first + inside + self.cuts[rank] in (self.documents or ()):
                starts.append(before + first)
            lengths.append(first + last)
        return SequenceLayout.from_lengths(lengths, starts)

    @cached_property
    def _document_ends(self) -> tuple[tuple[int, int] | None, ...]:
        """The numbers of the documents of each rank's first and last token; None without tokens."""
        return tuple(
            (self.document_of(start), self.document_of(stop - 1)) if stop > start else None
            for start, stop in pairwise(self.cuts)
        )

    @cached_property
    def description(self) -> str:
        """All of this layout as `name=entry,entry,…` words: equal on two ranks exactly when the layouts are."""
        documents = "none" if self.documents is None else ",".join(map(str, self.documents))
        return f"cuts={','.join(map(str, self.cuts))} documents={documents}"


def _whole_numbers(what: str, values: Iterable[int]) -> tuple[int, ...]:
    """Convert the values to plain ints; refuses floats, which would round silently."""
    given = tuple(values)
    try:
        return tuple(index(value) for value in given)
    except TypeError:
        raise InputError(f"{what} {_short(given)} must be whole numbers") from None


def _short(values: Sequence[object]) -> str:
    """Show at most eight of the values, for messages."""
    tail = f", … ({len(values)} in all)" if len(values) > 8 else ""
    return f"[{', '.join(map(str, values[:8]))}{tail}]"
