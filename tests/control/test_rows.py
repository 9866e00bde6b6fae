"""Rows from pieces: right, in order, and the same bits however the tokens were cut over ranks and blocks."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_attn.control.scheduler import split
from dist_attn.errors import WireError
from dist_attn.rank_link.rows import GRAIN, RowAssembler, piece_edges, row_length
from dist_attn.wire.messages import RowSpec
from dist_attn.wire.rank_messages import RowPieces

DIM = 3

SPECS = st.builds(
    RowSpec,
    st.sampled_from(["token", "window", "document", "sentence"]),
    st.sampled_from([1, 3, 64, 500, 512, 700, 1024, 5000]),
    st.sampled_from(["mean", "last"]),
)


def hidden_states(total):
    """Repeatable float32 vectors whose sums depend on the order of adding."""
    return (np.random.default_rng(total).standard_normal((total, DIM)) * 1000).astype(np.float32)


def ends_of(total, spec):
    """Where marked rows of a text of so many tokens end, but for the last one."""
    number = np.random.default_rng(total).integers(0, 12)
    ends = np.random.default_rng(total + 1).integers(1, max(2, total), number) if spec.marked and total > 1 else []
    return sorted(set(map(int, ends)))


def pieces_of(hidden, start, stop, spec):
    """What a rank sends for its slice [start, stop)."""
    ends = [end for end in ends_of(len(hidden), spec) if start < end <= stop]
    edges = piece_edges(start, stop, spec, ends)
    if spec.pooling == "mean":
        vectors = [hidden[a:b].sum(0) for a, b in pairwise(edges)]
    else:
        vectors = [hidden[b - 1] for b in edges[1:]]
    return RowPieces(1, edges[:-1].tolist(), edges[1:].tolist(), np.stack(vectors).astype("<f4").tobytes(), ends)


def assemble(pieces, total, spec, *, total_known=True):
    """All rows of these pieces in the order in which they are given: starts, stops, vectors."""
    assembler = RowAssembler(spec, DIM)
    batches = [batch for piece in pieces for batch in assembler.add(piece, total if total_known else None)]
    batches += assembler.finish(total)
    assert assembler.position == total
    assert [b.first_row for b in batches] == np.cumsum([0, *(len(b.starts) for b in batches)])[:-1].tolist()
    return tuple(np.concatenate([getattr(b, name) for b in batches]) for name in ("starts", "stops", "vectors"))


@given(st.integers(1, 2000), SPECS)
def test_rows_are_the_means_or_last_vectors_of_their_tokens(total, spec):
    """Row n covers its tokens and no other, and the last row may be shorter."""
    hidden = hidden_states(total)
    starts, stops, vectors = assemble([pieces_of(hidden, 0, total, spec)], total, spec)
    length = row_length(spec) or total
    edges = [0, *ends_of(total, spec)] if spec.marked else list(range(0, total, length))
    assert starts.tolist() == edges
    assert stops.tolist() == [*edges[1:], total]
    for start, stop, vector in zip(starts, stops, vectors, strict=True):
        wanted = hidden[start:stop].mean(0, dtype=np.float64) if spec.pooling == "mean" else hidden[stop - 1]
        np.testing.assert_allclose(vector, wanted, rtol=1e-4, atol=1e-2)


@given(st.integers(1, 9000), SPECS, st.integers(1, 5), st.booleans(), st.data())
def test_rows_do_not_depend_on_ranks_blocks_or_order(total, spec, ranks, total_known, data):
    """Cut on the grid anywhere, and delivered in any order, the rows have the same bits as from one rank."""
    hidden = hidden_states(total)
    wanted = assemble([pieces_of(hidden, 0, total, spec)], total, spec)
    inner = data.draw(st.sets(st.integers(1, max(1, (total - 1) // GRAIN)).map(lambda cell: cell * GRAIN), max_size=4))
    edges = [0, *sorted(cut for cut in inner if cut < total), total]
    slices = []
    for start, stop in pairwise(edges):
        cuts = np.cumsum([start, *split(start, stop - start, ranks)])
        slices += [(int(a), int(b)) for a, b in pairwise(cuts) if b > a]
    pieces = [pieces_of(hidden, *part, spec) for part in data.draw(st.permutations(slices))]
    for got, due in zip(assemble(pieces, total, spec, total_known=total_known), wanted, strict=True):
        np.testing.assert_array_equal(got, due)


def test_a_row_comes_as_soon_as_its_last_token():
    """Rows are handed out when they are complete, not at the end."""
    spec, hidden = RowSpec("window", 100), hidden_states(250)
    assembler = RowAssembler(spec, DIM)
    assert [b.stops.tolist() for b in assembler.add(pieces_of(hidden, 0, 250, spec), None)] == [[100, 200]]
    assert [b.stops.tolist() for b in assembler.finish(250)] == [[250]]
    assert assembler.rows == 3


@pytest.mark.parametrize(
    "pieces",
    [
        RowPieces(1, [0], [4], b"\0" * 8),
        RowPieces(1, [0, 4], [4], b"\0" * 24),
        RowPieces(1, [0, 5], [4, 8], b"\0" * 24),
        RowPieces(1, [4], [4], b"\0" * 12),
    ],
    ids=["short vectors", "missing stop", "gap", "empty range"],
)
def test_pieces_that_do_not_fit_are_refused(pieces):
    """Sizes and ranges are checked before anything is added."""
    with pytest.raises(WireError):
        RowAssembler(RowSpec("window", 8), DIM).add(pieces, None)


def test_pieces_that_come_twice_are_refused():
    """A token is never counted twice, whether its rows are done or waiting."""
    assembler = RowAssembler(RowSpec("window", 8), DIM)
    for start in (0, 16):
        assembler.add(RowPieces(1, [start], [start + 8], b"\0" * 12), None)
    for start in (0, 16):
        with pytest.raises(WireError, match="twice"):
            assembler.add(RowPieces(1, [start], [start + 8], b"\0" * 12), None)
