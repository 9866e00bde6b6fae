"""Partial softmax attention: any placement against the oracle, merging, and every gradient."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dist_attn.errors import ShapeError
from dist_attn.ops.softmax_attention import (
    QueryPlacement,
    SoftmaxCall,
    SoftmaxOptions,
    attend_partially,
    merge_partials,
    softmax_attention,
    softmax_attention_naive,
    tiled,
)
from tests.support.closeness import assert_close
from tests.support.examples import examples

TOTAL = 40


def _inputs(queries: int, keys: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(2, 4, queries, 5), (2, 2, keys, 5), (2, 2, keys, 3)]
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def _placement(queries: int, keys: int, documents: bool, seed: int = 0) -> QueryPlacement:
    """Positions in any order, and documents of one token and more."""
    generator = torch.Generator().manual_seed(seed)
    where = [torch.randperm(TOTAL, generator=generator)[:count] for count in (queries, keys)]
    number_T = torch.cumsum(torch.rand(TOTAL, generator=generator) < 0.2, 0)
    return QueryPlacement(*where, *([number_T[w] for w in where] if documents else [None, None]))


def _partial(q, k, v, *, causal: bool, placement: QueryPlacement | None = None, scale: float | None = None):
    call = SoftmaxCall(q, k, v, causal, SoftmaxOptions(scale), placement)
    call.check()
    return attend_partially(call)


def _compare(got: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...]) -> None:
    for index, (a, b) in enumerate(zip(got, want, strict=True)):
        assert_close(a, b, kind="gradient" if index else "output", what=str(index))


def _run(attend, leaves: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    out = attend(*leaves)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    return (out.detach(), *torch.autograd.grad((out * weights).sum() + sum(0 * x.sum() for x in leaves), leaves))


@examples(40)
@given(
    queries=st.integers(0, TOTAL),
    keys=st.integers(0, TOTAL),
    causal=st.booleans(),
    documents=st.booleans(),
    tile=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_any_placement_equals_the_oracle(queries, keys, causal, documents, tile, seed):
    """Slices in any order, with and without documents, in tiles of any size: output and gradients of the oracle."""
    placement = _placement(queries, keys, documents, seed)
    leaves = _inputs(queries, keys, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiled, "TILE_QUERIES", tile)
        patch.setattr(tiled, "TILE_KEYS", tile + 2)
        patch.setattr(tiled, "TILE_ELEMENTS", 60)
        got = _run(lambda q, k, v: softmax_attention(q, k, v, causal=causal, scale=0.6, placement=placement), leaves)
    want = _run(lambda q, k, v: softmax_attention_naive(q, k, v, causal=causal, scale=0.6, placement=placement), leaves)
    _compare(got, want)


@pytest.mark.parametrize("causal", [True, False])
def test_parts_of_the_keys_merge_to_the_whole(causal):
    """Partial results over three cuts of the keys, an empty one too, merge to the result over all, with gradients."""
    leaves = _inputs(TOTAL, TOTAL)
    cuts = [0, 17, 17, TOTAL]

    def in_parts(q, k, v):
        parts = []
        for a, b in pairwise(cuts):
            placement = QueryPlacement(torch.arange(TOTAL), torch.arange(a, b))
            parts.append(_partial(q, k[:, :, a:b], v[:, :, a:b], causal=causal, placement=placement))
        out, lse = merge_partials(*zip(*parts, strict=True))
        return torch.cat([out, lse[..., None]], dim=-1)

    def whole(q, k, v):
        out, lse = _partial(q, k, v, causal=causal)
        return torch.cat([out, lse[..., None]], dim=-1)

    _compare(_run(in_parts, leaves), _run(whole, leaves))
    got = _run(lambda *x: in_parts(*x)[..., :-1], leaves)
    _compare(got, _run(lambda *x: softmax_attention_naive(*x, causal=causal), leaves))


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")
@pytest.mark.parametrize("causal", [True, False])
def test_products_by_onednn_change_nothing(causal, monkeypatch):
    """Large tiles have the same outputs and gradients by oneDNN."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(1, 4, 300, 64), (1, 1, 1280, 64), (1, 1, 1280, 128)]
    leaves = [torch.randn(s, generator=generator).requires_grad_() for s in shapes]
    placement = QueryPlacement(torch.arange(980, 1280), torch.arange(1280))

    def attend(*qkv):
        return _partial(*qkv, causal=causal, placement=placement).out

    asked, results = [], []
    for takes in (False, True):
        monkeypatch.setattr(tiled, "takes_onednn_linear", lambda *_, takes=takes: asked.append(takes) or takes)
        results.append(_run(attend, leaves))
    assert asked.count(True) > 0
    _compare(*results)


def test_gradcheck_of_output_and_weight():
    """Output and log-sum-exp have the gradients of finite differences, also where a query sees nothing."""
    placement = QueryPlacement(torch.tensor([3, 0, 6]), torch.tensor([1, 5, 3, 8]))
    leaves = [x[:1] for x in _inputs(3, 4)]

    def attend(q, k, v):
        out, lse = _partial(q, k, v, causal=True, placement=placement)
        return out, lse.masked_fill(lse == -torch.inf, 0.0)

    assert torch.autograd.gradcheck(attend, [x.detach().requires_grad_() for x in leaves])


def test_queries_that_see_no_key_are_zero():
    """Where a query's document has no key here, the output is 0, the weight is nothing, and no gradient is NaN."""
    q, k, v = _inputs(2, 3)
    placement = QueryPlacement(torch.tensor([0, 9]), torch.tensor([4, 5, 6]))
    out, lse = _partial(q, k, v, causal=True, placement=placement)
    assert torch.equal(out[:, :, 0], torch.zeros_like(out[:, :, 0]))
    assert bool((lse[:, :, 0] == -torch.inf).all()) and bool(lse[:, :, 1].isfinite().all())
    merged, _ = merge_partials([out, out], [lse, lse])
    (merged.sum() + out.sum()).backward()
    assert all(bool(x.grad.isfinite().all()) for x in (q, k, v))


def test_half_precision_inputs_are_summed_in_float32():
    """Over bf16 inputs the partial result is float32 and as close to float64 as rounded inputs allow."""
    q, k, v = (x.detach() for x in _inputs(TOTAL, TOTAL, dtype=torch.bfloat16))
    out, lse = _partial(q, k, v, causal=True)
    want = softmax_attention_naive(q.double(), k.double(), v.double(), causal=True)
    assert out.dtype == lse.dtype == torch.float32
    assert_close(out, want.float())


def test_large_scores_do_not_overflow():
    """Scores of a thousand are far beyond what exp can hold, and the result is still the oracle's."""
    leaves = _inputs(TOTAL, TOTAL)
    got = _run(lambda *x: _partial(*x, causal=True, scale=400.0)[0], leaves)
    _compare(got, _run(lambda *x: softmax_attention_naive(*x, causal=True, scale=400.0), leaves))


def test_placements_that_do_not_fit_are_named():
    """Positions of another number of tokens, or documents of one side alone, raise a ShapeError."""
    q, k, v = _inputs(3, 4)
    with pytest.raises(ShapeError, match="for 3 queries"):
        softmax_attention(q, k, v, causal=True, placement=QueryPlacement.in_order(4, 4))
    with pytest.raises(ShapeError, match="give both, or neither"):
        QueryPlacement(torch.arange(3), torch.arange(4), torch.zeros(3))
