"""Windows, soft caps and sinks of softmax attention on one rank: the oracle, transformers, bounded caches."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dist_attn.errors import InputError, ShapeError
from dist_attn.ops import (
    KeyValueCache,
    LocalSequenceOps,
    RelativePositions,
    SoftmaxOptions,
    softmax_attention_streaming,
)
from dist_attn.ops.softmax_attention import (
    CacheSlots,
    QueryPlacement,
    SoftmaxCall,
    softmax_attention_naive,
    softmax_attention_of_slots,
    tiled,
)
from dist_attn.ops.softmax_attention.attention import attend_exactly
from tests.support.closeness import assert_close
from tests.support.examples import examples
from tests.support.sharded_call import random_tensor

HEADS, GROUPS, SIZE, VALUES = 4, 2, 5, 3
OPTIONS = st.fixed_dictionaries(
    {
        "scale": st.sampled_from([None, 0.6]),
        "window": st.sampled_from([None, 1, 2, 5, 40]),
        "softcap": st.sampled_from([None, 0.8]),
        "sinks_H": st.sampled_from([None, random_tensor(HEADS, seed=3)]),
    }
)


def _inputs(queries: int, keys: int) -> list[Tensor]:
    shapes = [(2, HEADS, queries, SIZE), (2, GROUPS, keys, SIZE), (2, GROUPS, keys, VALUES)]
    return [random_tensor(*shape, seed=seed) for seed, shape in enumerate(shapes)]


def _run(attention, qkv: list[Tensor], given: dict) -> list[Tensor]:
    """Output and gradients of q, k, v and the sinks, where there are any."""
    leaves = [x.clone().requires_grad_() for x in (*qkv, given["sinks_H"]) if x is not None]
    sinks = {"sinks_H": leaves[3]} if len(leaves) > 3 else {}
    out = attention(*leaves[:3], **(given | sinks))
    loss = (out * random_tensor(*out.shape, seed=9)).sum() + sum(0 * x.sum() for x in leaves)
    return [out.detach(), *torch.autograd.grad(loss, leaves)]


def _compare(got: list[Tensor], want: list[Tensor]) -> None:
    for name, a, b in zip(["output", "q", "k", "v", "sinks"], got, want, strict=False):
        assert_close(a, b, kind="output" if name == "output" else "gradient", what=name)
    assert len(got) == len(want)


@examples(40)
@given(
    queries=st.integers(0, 30),
    keys=st.integers(0, 30),
    causal=st.booleans(),
    place=st.sampled_from(["in order", "anywhere", "documents"]),
    given=OPTIONS,
    tile=st.integers(1, 9),
)
def test_any_placement_equals_the_oracle(queries, keys, causal, place, given, tile):
    """All options together, in tiles of any size over tokens in any order: output and gradients of the oracle."""
    placement = None
    if place != "in order":
        generator = torch.Generator().manual_seed(tile)
        where = [torch.randperm(30, generator=generator)[:count] for count in (queries, keys)]
        number_T = torch.cumsum(torch.rand(30, generator=generator) < 0.2, 0)
        placement = QueryPlacement(*where, *([number_T[w] for w in where] if place == "documents" else [None, None]))
    inputs = _inputs(queries, keys)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiled, "TILE_QUERIES", tile)
        patch.setattr(tiled, "TILE_KEYS", tile + 2)
        patch.setattr(tiled, "TILE_ELEMENTS", 60)
        got = _run(
            lambda q, k, v, **o: attend_exactly(SoftmaxCall(q, k, v, causal, SoftmaxOptions(**o), placement)),
            inputs,
            given,
        )
    want = _run(
        lambda q, k, v, **o: softmax_attention_naive(q, k, v, causal=causal, placement=placement, **o), inputs, given
    )
    _compare(got, want)


def _streamed(q: Tensor, k: Tensor, v: Tensor, *, lengths: list[int], starts: list[int], **given) -> Tensor:
    cache, outs, at = KeyValueCache(k[:, :, :0], v[:, :, :0]), [], 0
    for length in lengths:
        part = slice(at, at + length)
        here = [start - at for start in starts if at <= start < at + length]
        ops = LocalSequenceOps(documents=here or None)
        out, cache = ops.softmax_attention_streaming(q[:, :, part], k[:, :, part], v[:, :, part], cache, **given)
        outs.append(out)
        at += length
        last = max((start for start in starts if start < at), default=0)
        assert cache.tokens == at - last
        assert cache.k_BGSK.shape[2] == min(at - last, given["window"] - 1 if given["window"] else at)
    return torch.cat(outs, 2)


@examples(40)
@given(
    lengths=st.lists(st.integers(0, 7) | st.just(1), min_size=1, max_size=6),
    starts=st.sets(st.integers(0, 20), max_size=2).map(sorted),
    given=OPTIONS,
)
def test_a_stream_equals_one_call(lengths, starts, given):
    """Blocks, single tokens and documents over a cache of the last window: output and gradients of one whole call."""
    total = sum(lengths)
    starts = [start for start in starts if start < total]
    positions = torch.arange(total)
    numbers = torch.bucketize(positions, torch.tensor(starts, dtype=torch.int64), right=True)
    placement = QueryPlacement(positions, positions, numbers, numbers)
    inputs = _inputs(total, total)
    got = _run(lambda q, k, v, **o: _streamed(q, k, v, lengths=lengths, starts=starts, **o), inputs, given)
    want = _run(
        lambda q, k, v, **o: softmax_attention_naive(q, k, v, causal=True, placement=placement, **o), inputs, given
    )
    _compare(got, want)


@pytest.mark.parametrize("window", [None, 1, 70, 150])
def test_decode_steps_write_into_room(window):
    """Steps without gradients equal the oracle, copy the cache seldom, and lie alike after a cache was stored."""
    total = 330
    q, k, v = _inputs(total, total)
    near = RelativePositions(random_tensor(HEADS, 7, SIZE, seed=5))
    options = SoftmaxOptions(0.6, window, 2.0, random_tensor(HEADS, seed=3), near)
    given = {name: getattr(options, name) for name in ("scale", "window", "softcap", "sinks_H", "relative")}
    want = softmax_attention_naive(q, k, v, causal=True, **given)
    cache, copies = KeyValueCache(k[:, :, :0], v[:, :, :0]), 0
    with torch.inference_mode():
        for token in range(total):
            at = slice(token, token + 1)
            here = [x[:, :, at] for x in (q, k, v)]
            stored = KeyValueCache(cache.k_BGSK.clone(), cache.v_BGSV.clone(), dropped=cache.dropped)
            _, other = softmax_attention_streaming(*here, stored, options=options)
            room = cache.room
            out, cache = softmax_attention_streaming(*here, cache, options=options)
            copies += cache.room is not room
            assert_close(out, want[:, :, at])
            assert cache.k_BGSK.stride() == other.k_BGSK.stride()
            assert cache.k_BGSK.storage_offset() == other.k_BGSK.storage_offset()
    assert cache.tokens == total and cache.k_BGSK.shape[2] == (total if window is None else window - 1)
    assert cache.room.k_BGRK.shape[2] <= (total + 64 if window is None else window + 64)
    assert copies <= 9


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("window", [None, 1, 70, 300])
def test_decode_steps_over_slots(window, shared):
    """Rows of different lengths in memory of one size equal the oracle, and are taken out as they would be alone."""
    total, begun = 560, [0, 3, 250]
    near = RelativePositions(*(random_tensor(1 if shared else HEADS, 7, x, seed=5) for x in (SIZE, VALUES)))
    plain = [SoftmaxOptions(None, window)] if shared else []  # without `near`, which alone is shared or not
    for options in (*plain, SoftmaxOptions(0.6, window, 2.0, random_tensor(HEADS, seed=3), near)):
        given = {name: getattr(options, name) for name in ("scale", "window", "softcap", "sinks_H", "relative")}
        q, k, v = (torch.cat([x[:1], x[1:], -x[:1]]) for x in _inputs(total, total))
        want = softmax_attention_naive(q, k, v, causal=True, **given)
        alone = [KeyValueCache(k[row : row + 1, :, :n], v[row : row + 1, :, :n]) for row, n in enumerate(begun)]
        slots = CacheSlots.of([None, *(cache.within(window) for cache in alone)], window)
        for step in range(300):
            at = torch.tensor(begun) + step
            here = [torch.cat([x[:1, :, :1], x[torch.arange(3), :, at][:, :, None]]) for x in (q, k, v)]
            if (window or total) > slots.k_BGRK.shape[2] <= at.max():
                slots = CacheSlots.of(
                    [None, *(slots.row(row + 1, n, window) for row, n in enumerate(at.tolist()))], window
                )
            kept, (out, slots) = slots, softmax_attention_of_slots(*here, slots, options=options)
            assert kept.k_BGRK is slots.k_BGRK
            assert_close(out[1:, :, 0], want[torch.arange(3), :, at])
        assert slots.k_BGRK.shape[2] == (1024 if window is None else 512 if window == 300 else 256)
        assert slots.tokens_B[1:].tolist() == [n + 300 for n in begun]
        for row, tokens in enumerate(slots.tokens_B[1:].tolist()):
            cache = slots.row(row + 1, tokens, window)
            first = 0 if window is None else tokens - window + 1
            assert (cache.dropped, cache.tokens) == (first, tokens)
            assert torch.equal(cache.k_BGSK, k[row : row + 1, :, first:tokens])
            assert torch.equal(cache.v_BGSV, v[row : row + 1, :, first:tokens])


def test_a_cache_of_more_than_the_window_is_cut():
    """A step through a window over a cache that holds more tokens sees the window alone."""
    inputs = _inputs(9, 9)
    q, k, v = (x[:, :, 8:] for x in inputs)
    cache = KeyValueCache(inputs[1][:, :, :8], inputs[2][:, :, :8])
    out, after = softmax_attention_streaming(q, k, v, cache, options=SoftmaxOptions(window=3))
    assert_close(out, softmax_attention_naive(*inputs, causal=True, window=3)[:, :, 8:])
    assert (after.dropped, after.tokens) == (7, 9)


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_transformers_eager_attention(name):
    """A window with Gemma 2's cap or gpt-oss's sinks gives what transformers' own eager attention gives, in blocks."""
    modeling = pytest.importorskip(f"transformers.models.{name}.modeling_{name}")
    total, window, sinks_H = 37, 8, random_tensor(HEADS, seed=3, dtype=torch.float32)
    q, k, v = (x.float() for x in _inputs(total, total))
    v = torch.cat([v, v[..., :2]], dim=3)
    positions = torch.arange(total)
    seen_LL = (positions <= positions[:, None]) & (positions > positions[:, None] - window)
    mask_LL = torch.zeros(total, total).masked_fill(~seen_LL, torch.finfo(torch.float32).min)
    module = SimpleNamespace(num_key_value_groups=HEADS // GROUPS, training=False, sinks=sinks_H)
    special = {"softcap": 1.5} if name == "gemma2" else {}
    want, _ = modeling.eager_attention_forward(module, q, k, v, mask_LL[None, None], scaling=0.3, **special)
    sinks = {} if name == "gemma2" else {"sinks_H": sinks_H}
    got = _streamed(q, k, v, lengths=[13, 1, 20, 3], starts=[], scale=0.3, window=window, **special, **sinks)
    torch.testing.assert_close(got.transpose(1, 2), want, atol=1e-5, rtol=0)


def test_the_scores_are_never_whole():
    """With every option no tensor is nearly as large as the scores of 4,000 tokens, forward or backward."""
    sizes = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            sizes.extend(t.numel() for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, Tensor))
            return out

    qkv = [random_tensor(1, 1, 4000, 4, seed=seed, dtype=torch.float32).requires_grad_() for seed in range(3)]
    with Watch():
        given = {"window": 300, "softcap": 2.0, "sinks_H": torch.zeros(1)}
        out, _ = LocalSequenceOps().softmax_attention_streaming(
            *qkv, KeyValueCache(*(x[:, :, :0] for x in qkv[1:])), **given
        )
        out.sum().backward()
    assert max(sizes) < 4000 * 300


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"window": 0}, InputError, "give 1 or more"),
        ({"softcap": 0.0}, InputError, "give a positive one"),
        ({"sinks_H": torch.zeros(GROUPS)}, ShapeError, "for 4 query heads"),
    ],
)
def test_options_that_mean_nothing_are_refused(given, error, words):
    """A window of no token, a cap of zero and sinks of other heads raise errors that say what is needed."""
    q, k, v = _inputs(3, 3)
    with pytest.raises(error, match=words):
        LocalSequenceOps().softmax_attention_streaming(q, k, v, KeyValueCache(k[:, :, :0], v[:, :, :0]), **given)
