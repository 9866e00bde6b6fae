"""Rows as text: byte offsets and floats."""

import json

import numpy as np
import pytest
from dist_attn_service.base.errors import EngineFailure
from dist_attn_service.encodings.encoding_run import row_block
from dist_attn_service.encodings.formats import format_rows
from hypothesis import given
from hypothesis import strategies as st

from dist_attn.errors import WireError
from dist_attn.text.byte_offsets import ByteOffsets
from dist_attn.wire.floats import shortest_float32
from dist_attn.wire.messages import Rows, RowSpec


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=50))
def test_floats_read_back_exactly(values: list[float]) -> None:
    """Every float32, subnormals included, reads back bit for bit."""
    given_values = np.array(values, dtype=np.float32)
    text = json.dumps(shortest_float32(given_values).tolist())
    again = np.array(json.loads(text), dtype=np.float32)
    assert again.tobytes() == given_values.tobytes()


def test_floats_are_as_short_as_numpy_prints_them() -> None:
    """The text has the fewest digits that identify the float32."""
    values = np.random.default_rng(3).standard_normal(5_000).astype(np.float32)
    ours = [len(repr(x)) for x in shortest_float32(values).tolist()]
    theirs = [len(np.format_float_positional(x, unique=True)) for x in values]
    assert sum(ours) <= sum(theirs) * 1.01
    assert shortest_float32(np.array([0.1, 2.5, 1000.0, 0.0], dtype=np.float32)).tolist() == [0.1, 2.5, 1000.0, 0.0]


@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=60),
    cut=st.integers(1, 7),
    window=st.integers(1, 20),
    granularity=st.sampled_from(["token", "window", "document"]),
)
def test_offsets_do_not_depend_on_pieces(lengths: list[int], cut: int, window: int, granularity: str) -> None:
    """However the tokens were cut into pieces, each row gets the byte range of its tokens."""
    offsets = ByteOffsets(RowSpec(granularity=granularity, window=window))
    for start in range(0, len(lengths), cut):
        offsets.push(np.array(lengths[start : start + cut]))
    every = {"token": 1, "window": window, "document": len(lengths)}[granularity]
    starts = list(range(0, len(lengths), every))
    stops = [min(start + every, len(lengths)) for start in starts]
    edges = [0, *np.cumsum(lengths).tolist()]
    assert offsets.ranges(starts, stops) == [(edges[a], edges[b]) for a, b in zip(starts, stops, strict=True)]


def test_offsets_keep_only_rows_to_come() -> None:
    """Memory does not grow with the document: nothing is kept for rows that went out."""
    offsets = ByteOffsets(RowSpec(granularity="window", window=10))
    for piece in range(200):
        offsets.push(np.ones(50, dtype=np.int64))
        starts = list(range(piece * 50, piece * 50 + 50, 10))
        offsets.ranges(starts, [start + 10 for start in starts])
        assert len(offsets._ends) <= 1
    document = ByteOffsets(RowSpec(granularity="document"))
    document.push(np.ones(10_000, dtype=np.int64))
    assert not document._ends


@pytest.mark.parametrize("bad", [([5], [10]), ([0], [7])])
def test_rows_that_nobody_asked_for_are_refused(bad: tuple[list[int], list[int]]) -> None:
    """A gap, or a row that ends where none should, is an error and never wrong offsets."""
    offsets = ByteOffsets(RowSpec(granularity="window", window=5))
    offsets.push(np.ones(20, dtype=np.int64))
    with pytest.raises(WireError):
        offsets.ranges(*bad)


def test_lines_have_the_contract_form() -> None:
    """One JSON object per line, keys in the contract's order, and a value that is not finite is refused."""
    vectors = np.array([[0.1, 2.0], [3.0, -4.5]], dtype="<f4")
    rows = Rows(request_id="r", first_row=7, starts=[0, 5], stops=[5, 9], vectors=vectors.tobytes())
    text = format_rows(row_block(rows, 1, 1, [(6, 11)], 2))
    assert text == (b'{"index":8,"start":5,"stop":9,"byte_start":6,"byte_stop":11,"embedding":[3.0,-4.5]}\n')
    vectors[1, 0] = np.nan
    broken = Rows(request_id="r", first_row=7, starts=[0, 5], stops=[5, 9], vectors=vectors.tobytes())
    with pytest.raises(EngineFailure, match="row 8"):
        row_block(broken, 1, 1, [(6, 11)], 2)
