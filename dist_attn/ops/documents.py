"""Documents packed into one sequence: where each starts, which tokens see which, and runs of whole documents.

Starts are rising positions. Tokens before the first start continue the document that the incoming state belongs to, so
`()` is one unbroken sequence and `(0,)` a sequence that begins a document of its own.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from operator import index
from typing import ClassVar

import torch

from dist_attn.errors import InputError, ShapeError
from dist_attn.ops.device import send, sum_rows
from dist_attn.ops.sequence_call import SequenceCall, local_form

__all__ = [
    "DocumentPlaces",
    "SumCall",
    "chunk_blocks",
    "check_documents",
    "document_groups",
    "document_numbers",
    "document_places",
    "document_ranges",
    "document_runs",
    "document_starts",
    "places_of_all",
    "same_document",
    "split_tokens",
    "start_flags",
    "sum_tokens",
    "sums_of_documents",
]


@dataclass(frozen=True)
class DocumentPlaces:
    """The places of the tokens held here: the number of their document, and the distance from its first token.

    `lengths_N` counts the tokens of each document, those on other ranks among them. `goes_on` says whether the first
    one may continue what a state in is of.
    """

    number_L: torch.Tensor
    position_L: torch.Tensor
    lengths_N: tuple[int, ...]
    goes_on: bool


def document_places(
    ranges: Sequence[tuple[int, int]], start: int, stop: int, starts: tuple[int, ...]
) -> DocumentPlaces:
    """The places of the global tokens [start, stop), of documents that lie at `ranges` and begin at `starts`."""
    starts_N = torch.tensor([first for first, _ in ranges], dtype=torch.int64, device="cpu")
    tokens_L = torch.arange(start, stop, device="cpu")
    number_L = torch.bucketize(tokens_L, starts_N, right=True) - 1
    lengths_N = tuple(last - first for first, last in ranges)
    return DocumentPlaces(number_L, tokens_L - starts_N[number_L], lengths_N, starts[:1] != (0,))


def sums_of_documents(x_BLD: torch.Tensor, places: DocumentPlaces) -> torch.Tensor:
    """For each document the sum over its tokens that are held here, [B, L, D] -> [B, N, D]; 0 where none is.

    Half precision is added up in float32 and comes out as float32.
    """
    wide_BLD = x_BLD.to(torch.promote_types(x_BLD.dtype, torch.float32))
    batch, documents = x_BLD.shape[0], len(places.lengths_N)
    number_BL = torch.arange(batch, device="cpu")[:, None] * documents + places.number_L
    sums_ND = sum_rows(wide_BLD.flatten(0, 1), send(number_BL.flatten(), x_BLD.device), batch * documents)
    return sums_ND.view(batch, documents, x_BLD.shape[2])


@dataclass(frozen=True)
class SumCall(SequenceCall[torch.Tensor]):
    """The sum over all tokens, [B, L, D] -> [B, D], or over those of each document, [B, N, D]."""

    x_BLD: torch.Tensor
    by_document: bool = False

    operation: ClassVar[str] = "sum_over_sequence"
    along: ClassVar[tuple[str, ...]] = ("x_BLD",)


@local_form(SumCall)
def sum_tokens(call: SumCall) -> torch.Tensor:
    """The sums of a call.

    Raises: ShapeError for a document that starts behind the sequence.
    """
    if not call.by_document:
        return call.x_BLD.sum(dim=1)
    return sums_of_documents(call.x_BLD, places_of_all(call.x_BLD.shape[1], call.documents))


def places_of_all(length: int, starts: tuple[int, ...]) -> DocumentPlaces:
    """The places of all tokens of a sequence; an unbroken one is one document.

    Raises: ShapeError for a document that starts behind the sequence.
    """
    check_documents(starts, length)
    return document_places(document_ranges(starts, length), 0, length, starts)


def document_starts(starts: Iterable[int]) -> tuple[int, ...]:
    """The starts as rising whole numbers.

    Raises: InputError if they are anything else.
    """
    given = tuple(starts)
    try:
        numbers = tuple(index(start) for start in given)
    except TypeError:
        numbers = (-1,)
    if (numbers and numbers[0] < 0) or any(a >= b for a, b in pairwise(numbers)):
        raise InputError(
            f"documents {str(given[:8])[:80]} ({len(given)} in all) must be rising whole numbers from 0 on: give where "
            "each document starts, not how long it is"
        )
    return numbers


def check_documents(documents: tuple[int, ...], length: int, keys: int | None = None) -> None:
    """Raise ShapeError unless every document starts inside the sequence, and keys lie on the same sequence."""
    if keys is not None and keys != length:
        raise ShapeError(
            f"{length} queries and {keys} keys were given with documents; documents need as many keys as queries, of "
            "the same sequence"
        )
    if documents and documents[-1] >= length:
        raise ShapeError(f"a document starts at {documents[-1]}, but the sequence has {length} tokens")


def document_ranges(documents: tuple[int, ...], length: int) -> tuple[tuple[int, int], ...]:
    """The tokens [start, stop) of each document, in order; the first may continue an earlier one."""
    if not length:
        return ()
    # Compilers warn of cached functions, so that an unbroken sequence does without.
    return _ranges(documents, length) if documents else ((0, length),)


@lru_cache(maxsize=64)
def _ranges(documents: tuple[int, ...], length: int) -> tuple[tuple[int, int], ...]:
    edges = documents if documents[:1] == (0,) else (0, *documents)
    return tuple(pairwise((*edges, length)))


def chunk_blocks(length: int, chunk: int, most: int, documents: tuple[int, ...] = ()) -> list[tuple[int, int]]:
    """Token ranges of whole chunks, up to `most` tokens of them, then of the rest, of each document by itself."""
    blocks: list[tuple[int, int]] = []
    for start, stop in document_ranges(documents, length):
        whole = stop - (stop - start) % chunk
        blocks += [(a, b) for a, b in pairwise([*range(start, whole, most), whole, stop]) if a < b]
    return blocks


@lru_cache(maxsize=64)
def document_groups(documents: tuple[int, ...], length: int, longest: int) -> tuple[tuple[int, int], ...]:
    """Consecutive whole documents as ranges of at most `longest` tokens; a longer document is a range by itself.

    At most 2 length / longest + 1 ranges, however many documents there are.
    """
    groups: list[tuple[int, int]] = []
    for start, stop in document_ranges(documents, length):
        if groups and stop - groups[-1][0] <= longest:
            groups[-1] = (groups[-1][0], stop)
        else:
            groups.append((start, stop))
    return tuple(groups)


@lru_cache(maxsize=64)
def document_runs(
    documents: tuple[int, ...], length: int, longest: int
) -> tuple[tuple[int, int, tuple[tuple[int, int], ...]], ...]:
    """The sequence as ranges [start, stop): single documents above `longest` tokens, and runs of shorter ones.

    A run comes with its `document_groups`, counted from its start; a long document with none.
    """
    runs: list[tuple[int, int, list[tuple[int, int]]]] = []
    for start, stop in document_groups(documents, length, longest):
        if stop - start > longest:
            runs.append((start, stop, []))
            continue
        begin, _, groups = runs.pop() if runs and runs[-1][2] else (start, start, [])
        groups.append((start - begin, stop - begin))
        runs.append((begin, stop, groups))
    return tuple((start, stop, tuple(groups)) for start, stop, groups in runs)


def split_tokens(
    sequence: Sequence[torch.Tensor | None], ranges: Sequence[tuple[int, int]]
) -> Iterator[tuple[torch.Tensor | None, ...]]:
    """The parts [B, H, part, ...] of every tensor, range after range; the ranges tile the sequence.

    One split, not a slice per range: the backward pass of a slice fills a zero tensor of full size.
    """
    sizes = [stop - start for start, stop in ranges]
    parts = [[None] * len(sizes) if t is None else t.split(sizes, dim=2) for t in sequence]
    return zip(*parts, strict=True)


def start_flags(documents: tuple[int, ...], length: int, device: torch.device | None = None) -> torch.Tensor:
    """Mark the tokens at which a document starts, bool [L]."""
    flags_L = torch.zeros(length, dtype=torch.bool, device="cpu")
    flags_L[torch.tensor(documents, dtype=torch.int64, device="cpu")] = True
    return flags_L if device is None else send(flags_L, device)


def document_numbers(documents: tuple[int, ...], length: int, device: torch.device | None = None) -> torch.Tensor:
    """The number of each token's document, int64 [L]: 0 before the first start, 1 from it on, and so forth."""
    return start_flags(documents, length, device).cumsum(0)


def same_document(start_flags_L: torch.Tensor) -> torch.Tensor:
    """Mark the pairs of tokens that are of one document, bool [..., L, L]; flags [..., L] as of `start_flags`."""
    number_L = start_flags_L.cumsum(-1)
    return number_L[..., :, None] == number_L[..., None, :]
