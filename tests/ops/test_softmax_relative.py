"""Relative positions (Shaw) in exact softmax attention: golden vectors, loops by hand, the oracle, and every mode."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dist_attn.errors import ShapeError
from dist_attn.ops import KeyValueCache, LocalSequenceOps, RelativePositions, softmax_attention
from dist_attn.ops.softmax_attention import QueryPlacement, softmax_attention_naive, tiled
from tests.support.closeness import assert_close
from tests.support.examples import examples
from tests.support.golden import golden
from tests.support.sharded_call import random_tensor

SIZE, VALUES = 5, 3


def _inputs(
    queries: int, keys: int, reach: int, *, heads: int = 4, groups: int = 2, shared: bool = False, values: bool = True
) -> list[Tensor]:
    tables = 1 if shared else heads
    shapes = [(2, heads, queries, SIZE), (2, groups, keys, SIZE), (2, groups, keys, VALUES)]
    shapes.append((tables, 2 * reach + 1, SIZE))
    if values:
        shapes.append((tables, 2 * reach + 1, VALUES))
    return [random_tensor(*shape, seed=seed).requires_grad_() for seed, shape in enumerate(shapes)]


def _run(attend, leaves: list[Tensor], **options) -> list[Tensor]:
    q, k, v, *tables = leaves
    out = attend(q, k, v, relative=RelativePositions(*tables), **options)
    loss = (out * random_tensor(*out.shape, seed=9)).sum() + sum(0 * x.sum() for x in leaves)
    return [out.detach(), *torch.autograd.grad(loss, leaves)]


def _compare(got: list[Tensor], want: list[Tensor]) -> None:
    for name, a, b in zip(["output", "q", "k", "v", "keys", "values"], got, want, strict=False):
        assert_close(a, b, kind="output" if name == "output" else "gradient", what=name)


@pytest.mark.parametrize("attend", [softmax_attention, softmax_attention_naive])
@pytest.mark.parametrize("causal", [False, True])
def test_golden_relative_keys(attend, causal):
    """The independent vectors of softmax((q k^T + S_rel) / sqrt(d)) v with a reach of 2."""
    g = golden("softmax_mhsa")
    q, k, v = (g[f"shaw_{name}"][None, None] for name in "qkv")
    got = attend(q, k, v, causal=causal, relative=RelativePositions(g["shaw_RP"][None]))
    assert_close(got[0, 0], g["shaw_out_causal" if causal else "shaw_out"], kind="golden")


def test_keys_and_values_by_hand():
    """Loops over heads, queries and keys, with rows for keys and values, give what the tiles give."""
    q, k, v, near_k, near_v = (x.detach() for x in _inputs(6, 6, 2, groups=4))
    want = torch.zeros(2, 4, 6, VALUES, dtype=torch.float64)
    for b in range(2):
        for h in range(4):
            for i in range(6):
                rows = [max(-2, min(2, j - i)) + 2 for j in range(i + 1)]
                logits = [float(q[b, h, i] @ (k[b, h, j] + near_k[h, rows[j]])) / math.sqrt(SIZE) for j in range(i + 1)]
                total = sum(math.exp(logit) for logit in logits)
                for j in range(i + 1):
                    want[b, h, i] += math.exp(logits[j]) / total * (v[b, h, j] + near_v[h, rows[j]])
    got = softmax_attention(q, k, v, causal=True, relative=RelativePositions(near_k, near_v))
    assert_close(got, want)


@examples(25)
@given(
    queries=st.integers(0, 30),
    keys=st.integers(0, 30),
    reach=st.integers(0, 9),
    causal=st.booleans(),
    documents=st.booleans(),
    shared=st.booleans(),
    values=st.booleans(),
    tile=st.integers(1, 9),
)
def test_any_placement_equals_the_oracle(queries, keys, reach, causal, documents, shared, values, tile):
    """Tiles of any size over slices in any order, near and far, grouped: output and every gradient of the oracle."""
    generator = torch.Generator().manual_seed(tile)
    where = [torch.randperm(30, generator=generator)[:count] for count in (queries, keys)]
    number_T = torch.cumsum(torch.rand(30, generator=generator) < 0.2, 0)
    placement = QueryPlacement(*where, *([number_T[w] for w in where] if documents else [None, None]))
    leaves = _inputs(queries, keys, reach, shared=shared, values=values)
    options = {"causal": causal, "scale": 0.6, "placement": placement}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiled, "TILE_QUERIES", tile)
        patch.setattr(tiled, "TILE_KEYS", tile + 2)
        patch.setattr(tiled, "TILE_ELEMENTS", 60)
        got = _run(softmax_attention, leaves, **options)
    _compare(got, _run(softmax_attention_naive, leaves, **options))
    assert got[0].shape[2] == queries and len(got) == 1 + len(leaves)


@pytest.mark.parametrize(("causal", "prefix"), [(False, 0), (True, 0), (True, 4)])
@pytest.mark.parametrize(("queries", "keys"), [(9, 9), (4, 11), (11, 4)])
def test_whole_sequences_equal_the_oracle(causal, prefix, queries, keys):
    """Without a placement, also with a prefix and with L != S: output and every gradient of the oracle."""
    leaves = _inputs(queries, keys, 3)
    options = {"causal": causal, "prefix": prefix}
    got = _run(softmax_attention, leaves, **options)
    _compare(got, _run(softmax_attention_naive, leaves, **options))
    assert got[0].shape[2] == queries and len(got) == 1 + len(leaves)


def test_packed_documents_equal_documents_alone():
    """Each document's outputs and gradients are those of the document by itself: its positions start with it."""
    starts, total = (3, 4, 10), 17
    leaves = _inputs(total, total, 2)
    for causal in (False, True):
        got = _run(LocalSequenceOps(documents=starts).softmax_attention, leaves, causal=causal)

        def alone(q, k, v, *, relative, causal=causal):
            parts = zip((0, *starts), (*starts, total), strict=True)
            outs = [
                softmax_attention_naive(*(x[:, :, a:b] for x in (q, k, v)), causal=causal, relative=relative)
                for a, b in parts
            ]
            return torch.cat(outs, dim=2)

        _compare(got, _run(alone, leaves))
        assert got[0].shape[2] == total and len(got) == 1 + len(leaves)


@pytest.mark.parametrize("documents", [None, (0, 6, 9)])
def test_a_stream_of_blocks_equals_one_call(documents):
    """Blocks over a cache, documents among their tokens, see the distances of one call."""
    q, k, v, *tables = (x.detach() for x in _inputs(12, 12, 3))
    relative = RelativePositions(*tables)
    want = LocalSequenceOps(documents=documents).softmax_attention(q, k, v, causal=True, relative=relative)
    cache, outs = KeyValueCache(k[:, :, :0], v[:, :, :0]), []
    for start, stop in ((0, 2), (2, 7), (7, 7), (7, 8), (8, 12)):
        here = None if documents is None else [s - start for s in documents if start <= s < stop]
        part = slice(start, stop)
        out, cache = LocalSequenceOps(documents=here or None).softmax_attention_streaming(
            q[:, :, part], k[:, :, part], v[:, :, part], cache, relative=relative
        )
        outs.append(out)
    assert_close(torch.cat(outs, dim=2), want)


def test_the_scores_are_never_whole():
    """Over 4,000 tokens no tensor is as large as a score matrix, nor as one row of values per pair."""
    sizes = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            sizes.extend(t.numel() for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, Tensor))
            return out

    q, k, v = (random_tensor(1, 1, 4000, 4, seed=seed, dtype=torch.float32) for seed in range(3))
    relative = RelativePositions(*(random_tensor(1, 33, 4, seed=seed, dtype=torch.float32) for seed in (3, 4)))
    with Watch():
        out = softmax_attention(q, k, v, causal=True, relative=relative)
    assert out.shape == q.shape
    assert max(sizes) < 4000 * 300


@pytest.mark.parametrize(
    ("keys", "values"), [((3, 5, SIZE), None), ((4, 4, SIZE), None), ((4, 5, SIZE), (4, 3, VALUES)), ((4, 5, 2), None)]
)
def test_rows_that_do_not_fit_are_named(keys, values):
    """Other numbers of heads, even numbers of rows, more rows for one of both, other sizes: a ShapeError in words."""
    q, k, v, *_ = _inputs(6, 6, 2)
    relative = RelativePositions(torch.zeros(keys), None if values is None else torch.zeros(values))
    with pytest.raises(ShapeError, match=r"2 reach \+ 1"):
        softmax_attention(q, k, v, causal=True, relative=relative)
