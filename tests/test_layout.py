"""SequenceLayout: the integers of sharding, tested without a process or a tensor."""

import dataclasses
import subprocess
import sys
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_attn.errors import InputError
from dist_attn.layout import SequenceLayout

lengths_lists = st.lists(st.integers(0, 40), min_size=1, max_size=9)


@st.composite
def layouts(draw: st.DrawFn) -> SequenceLayout:
    """Any layout, with or without documents."""
    lengths = draw(lengths_lists)
    total = sum(lengths)
    positions = st.sets(st.integers(0, total - 1), max_size=8) if total else st.just(set())
    documents = draw(st.none() | positions.map(sorted))
    return SequenceLayout.from_lengths(lengths, documents)


@given(lengths_lists)
def test_ranges_tile_the_sequence(lengths: list[int]) -> None:
    """The ranks' ranges follow each other without gap or overlap, empty ones included."""
    layout = SequenceLayout.from_lengths(lengths)
    assert layout.lengths == tuple(lengths)
    assert layout.total == sum(lengths)
    assert layout.size == len(lengths)
    held = [token for rank in range(layout.size) for token in range(*layout.range(rank))]
    assert held == list(range(layout.total))


@given(total=st.integers(0, 200), size=st.integers(1, 9), multiple_of=st.integers(1, 17))
def test_even_is_balanced_and_on_the_grid(total: int, size: int, multiple_of: int) -> None:
    """An even layout loses no token, cuts on the grid and differs by at most one grid step between ranks."""
    layout = SequenceLayout.even(total, size, multiple_of)
    assert layout.size == size
    assert layout.total == total
    assert all(cut % multiple_of == 0 or cut == total for cut in layout.cuts)
    assert max(layout.lengths) - min(layout.lengths) < 2 * multiple_of
    steps = [-(-length // multiple_of) for length in layout.lengths]
    assert max(steps) - min(steps) <= 1


@given(layouts())
def test_documents_tile_the_sequence_and_reach_every_rank(layout: SequenceLayout) -> None:
    """Documents follow each other without gap, and the starts seen by the ranks are all of the starts."""
    tokens = [token for start, stop in layout.document_ranges() for token in range(start, stop)]
    assert tokens == list(range(layout.total))
    seen = [layout.range(rank)[0] + start for rank in range(layout.size) for start in layout.documents_on(rank)]
    assert seen == list(layout.documents or ())


@pytest.mark.parametrize(
    ("lengths", "documents", "ranges"),
    [
        ([3, 4], None, [(0, 7)]),
        ([3, 4], [0], [(0, 7)]),
        ([3, 4], [3], [(0, 3), (3, 7)]),
        ([3, 0, 4], [0, 1, 2, 3], [(0, 1), (1, 2), (2, 3), (3, 7)]),
        ([1, 1, 1, 1, 1], [0], [(0, 5)]),
        ([0, 0], None, []),
        ([0, 0], [], []),
    ],
)
def test_document_ranges(lengths: list[int], documents: list[int] | None, ranges: list[tuple[int, int]]) -> None:
    """A document may be one token, span every rank, start exactly at a cut, or continue an earlier block."""
    assert list(SequenceLayout.from_lengths(lengths, documents).document_ranges()) == ranges


@given(layouts())
def test_ranks_of_a_document_know_each_other(layout: SequenceLayout) -> None:
    """A rank's earlier and later ranks are those that hold tokens of its first and its last document, and no others."""
    number = [layout.document_of(token) for token in range(layout.total)]
    held = [number[slice(*layout.range(rank))] for rank in range(layout.size)]
    for rank, own in enumerate(held):
        before = tuple(r for r in range(rank) if own and own[0] in held[r])
        after = tuple(r for r in range(rank + 1, layout.size) if own and own[-1] in held[r])
        assert (layout.ranks_before(rank), layout.ranks_after(rank)) == (before, after)
    assert layout.crosses_cuts == any(layout.ranks_before(rank) for rank in range(layout.size))
    assert layout.ranks_of_last_document() == tuple(r for r, own in enumerate(held) if own and number[-1] in own)


@given(layouts())
def test_what_lies_across_cuts_is_a_layout_of_its_own(layout: SequenceLayout) -> None:
    """Pieces of a rank tile it, and the tokens of documents on several ranks keep their order and their documents."""
    number = [layout.document_of(token) for token in range(layout.total)]
    spread = {n for r in range(layout.size) for n in number[slice(*layout.range(r))] if layout.ranks_before(r)}
    across = [n for n in number if sum(n in number[slice(*layout.range(r))] for r in range(layout.size)) > 1]
    assert set(across) <= spread
    own = layout.across_cuts
    assert own.total == len(across)
    numbers = [own.document_of(token) for token in range(own.total)]
    assert [a == b for a, b in pairwise(numbers)] == [a == b for a, b in pairwise(across)]
    for rank in range(layout.size):
        first, inside, last = layout.pieces(rank)
        assert min(first, inside, last) >= 0
        assert first + inside + last == layout.lengths[rank]
        assert own.lengths[rank] == first + last


@pytest.mark.parametrize(
    ("cu_seqlens", "lengths", "documents"),
    [
        ([0, 3, 7], [3, 4], (0, 3)),
        ([0, 7], [3, 0, 4], (0,)),
        ([0, 0, 2, 2, 7, 7], [7], (0, 2)),
        ([0], [0, 0], ()),
    ],
)
def test_from_cumulative_lengths(cu_seqlens: list[int], lengths: list[int], documents: tuple[int, ...]) -> None:
    """Cumulative lengths of packed documents become their starts; documents without tokens leave no trace."""
    layout = SequenceLayout.from_cu_seqlens(cu_seqlens, lengths)
    assert layout.documents == documents
    assert layout.lengths == tuple(lengths)


@pytest.mark.parametrize(("cu_seqlens", "lengths"), [([], [3]), ([1, 3], [3]), ([0, 3, 2], [2]), ([0, 3], [4])])
def test_cumulative_lengths_that_do_not_fit_are_refused(cu_seqlens: list[int], lengths: list[int]) -> None:
    """Cumulative lengths begin at 0, never fall, and end at the number of tokens that the ranks hold."""
    with pytest.raises(InputError, match="cu_seqlens"):
        SequenceLayout.from_cu_seqlens(cu_seqlens, lengths)


@given(layouts(), layouts())
def test_descriptions_tell_layouts_apart(one: SequenceLayout, other: SequenceLayout) -> None:
    """Two layouts have the same description exactly when they are equal."""
    assert (one.description == other.description) == (one == other)


def test_a_description_is_stable() -> None:
    """The description is the same in every process and release, so ranks of different hosts can compare it."""
    layout = SequenceLayout.from_lengths([13, 0, 4], documents=[0, 5, 13])
    assert layout.description == "cuts=0,13,13,17 documents=0,5,13"


def test_no_documents_is_not_an_empty_list_of_documents() -> None:
    """None and an empty list mean the same tokens but are kept apart, as they were given."""
    assert SequenceLayout.from_lengths([3]) != SequenceLayout.from_lengths([3], documents=[])


@pytest.mark.parametrize(
    ("lengths", "documents"),
    [
        ([], None),
        ([3, -1], None),
        ([3.0], None),
        (["3"], None),
        ([3, 4], [0, 7]),
        ([3, 4], [-1]),
        ([3, 4], [2, 2]),
        ([3, 4], [4, 1]),
        ([3, 4], [1.5]),
        ([0], [0]),
    ],
)
def test_wrong_tables_are_refused(lengths: list[int], documents: list[int] | None) -> None:
    """A table that is not sorted whole numbers inside the sequence is an InputError."""
    with pytest.raises(InputError):
        SequenceLayout.from_lengths(lengths, documents)


@pytest.mark.parametrize(("total", "size", "multiple_of"), [(-1, 1, 1), (4, 0, 1), (4, 1, 0), (4.5, 1, 1)])
def test_even_refuses_impossible_splits(total: int, size: int, multiple_of: int) -> None:
    """An even split needs tokens, ranks and a grid that exist."""
    with pytest.raises(InputError):
        SequenceLayout.even(total, size, multiple_of)


def test_an_unknown_rank_is_refused() -> None:
    """Asking for a rank that is not there says which ones are."""
    layout = SequenceLayout.from_lengths([3, 4])
    with pytest.raises(InputError, match="ranks are 0 to 1"):
        layout.range(2)
    with pytest.raises(InputError):
        layout.range(-1)


def test_long_tables_are_shortened_in_messages() -> None:
    """An error about a table of a thousand ranks names a few of them."""
    with pytest.raises(InputError, match=r"1000 in all") as caught:
        SequenceLayout.from_lengths([-1] * 1000)
    assert len(str(caught.value)) < 200


def test_layout_is_frozen() -> None:
    """A layout is a value: it cannot change under a rank that uses it."""
    layout = SequenceLayout.from_lengths([3, 4])
    with pytest.raises(dataclasses.FrozenInstanceError):
        layout.cuts = (0, 7)  # type: ignore[misc]


def test_layout_needs_no_torch() -> None:
    """The arithmetic of layouts can be used by processes that never load torch."""
    code = "import sys, dist_attn.layout; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
