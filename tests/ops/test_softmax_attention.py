"""Exact softmax attention: the fused form against the oracle and the golden vectors."""

from typing import Any

import pytest
import torch

from benchmarks.memory import TrackedMemory
from dist_attn.errors import ShapeError
from dist_attn.ops import KeyValueCache, SoftmaxOptions, softmax_attention, softmax_attention_streaming
from dist_attn.ops.softmax_attention import SoftmaxCall, softmax_attention_naive
from dist_attn.ops.softmax_attention.attention import attend_after, for_kernel
from tests.support.closeness import assert_close
from tests.support.golden import golden


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys", "groups"), [(7, 7, 4), (5, 9, 2), (9, 5, 1), (0, 3, 4)])
def test_fused_equals_oracle(causal, queries, keys, groups):
    """Output and every gradient equal the oracle's for other lengths and grouped key heads, aligned at the top left."""
    results = []
    for attention in (softmax_attention_naive, softmax_attention):
        g = torch.Generator().manual_seed(0)
        q, k, v = (
            torch.randn(2, h, n, 3, generator=g, dtype=torch.float64, requires_grad=True)
            for h, n in ((4, queries), (groups, keys), (groups, keys))
        )
        out = attention(q, k, v, causal=causal, scale=0.7)
        (out.square().sum() + 0 * q.sum()).backward()
        results.append((out, q.grad, k.grad, v.grad))
    for got, want in zip(results[1], results[0], strict=True):
        if want is not None and got is not None:
            assert_close(got, want)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tokens", [9, 140])
def test_half_precision_gradients(tokens, causal):
    """Short and long sequences in bfloat16, also under an autocast, keep their type and have the gradients of float32,
    rounded."""
    g = torch.Generator().manual_seed(0)
    halves = [torch.randn(2, 3, tokens, 4, generator=g).bfloat16() for _ in range(3)]
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        leaves = [t.to(dtype).requires_grad_() for t in halves]
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            out = softmax_attention(*leaves, causal=causal)
        assert out.dtype == dtype
        found.append((out, *torch.autograd.grad(out.float().square().sum(), leaves)))
    for want, got in zip(*found, strict=True):
        assert_close(got, want.bfloat16(), kind="gradient")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("size", "values"), [(5, 3), (2, 6)])
def test_keys_and_values_of_other_sizes(size, values, causal):
    """Values narrower or wider than keys give the oracle's output and gradients, with the default scale."""
    g = torch.Generator().manual_seed(0)
    shapes = [(1, 2, 7, size), (1, 2, 9, size), (1, 2, 9, values)]
    leaves = [torch.randn(shape, generator=g, dtype=torch.float64, requires_grad=True) for shape in shapes]
    results = []
    for attention in (softmax_attention_naive, softmax_attention):
        out = attention(*leaves, causal=causal)
        results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    for got, want in zip(*results, strict=True):
        assert_close(want, got)


@pytest.mark.parametrize(
    ("device", "dtype", "masked", "groups", "width"),
    [
        ("cpu", torch.float32, False, 2, 33),
        ("cpu", torch.float32, True, 2, 33),
        ("cuda", torch.float32, False, 4, 40),
        ("cuda", torch.bfloat16, False, 2, 40),
        ("cuda", torch.bfloat16, True, 4, 40),
    ],
)
def test_no_device_takes_a_form_that_holds_all_scores(device, dtype, masked, groups, width):
    """On GPUs head sizes become multiples of 8 and groups of heads are copied where no kernel takes them: the oracle's
    attention all the same.
    """
    g = torch.Generator().manual_seed(0)
    given = [torch.randn(1, h, 9, n, generator=g).to(dtype) for h, n in ((4, 33), (2, 33), (2, 32))]
    q, k, v = for_kernel(*given, torch.device(device), masked=masked)
    assert q.shape == (1, 4, 9, width)
    assert k.shape == v.shape == (1, groups, 9, width)
    want = softmax_attention_naive(*given, causal=True)
    assert_close(softmax_attention_naive(q, k, v, causal=True, scale=33**-0.5)[..., :32], want)


@pytest.mark.parametrize("values", [4, 8, 16])
def test_the_scores_are_never_whole(values):
    """Whatever the sizes of keys and values, forward and backward hold less than the scores of all pairs would take."""
    length = 2048
    q, k = (torch.randn(1, 1, length, 8, requires_grad=True) for _ in range(2))
    v = torch.randn(1, 1, length, values, requires_grad=True)
    with TrackedMemory() as tracked:
        softmax_attention(q, k, v, causal=True).sum().backward()
    assert tracked.peak < length * length * 4 / 4


def test_golden_multi_head_attention():
    """The golden multi-head vectors come out, self, causal and cross."""
    g = golden("softmax_mhsa")

    def heads(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (int(g["H"]), -1)).transpose(0, 1)[None]

    for name, memory, causal in (("out", "X", False), ("out_causal", "X", True), ("out_cross", "Y", False)):
        q, k, v = heads(g["X"] @ g["Wq"].T), heads(g[memory] @ g["Wk"].T), heads(g[memory] @ g["Wv"].T)
        out = softmax_attention(q, k, v, causal=causal)[0].transpose(0, 1).flatten(1) @ g["Wo"].T + g["bo"]
        assert_close(out, g[name], kind="golden")


@pytest.mark.parametrize(
    ("queries", "keys", "words"),
    [
        ((1, 3, 2, 4), (1, 2, 2, 4), "must divide"),
        ((1, 3, 2, 4), (1, 0, 2, 4), "must divide"),
        ((2, 2, 2, 4), (1, 2, 2, 4), "equal batch"),
        ((1, 2, 2, 5), (1, 2, 2, 4), "equal size"),
        ((2, 2, 4), (2, 2, 4), "four dimensions"),
    ],
)
def test_shapes_that_do_not_fit_are_named(queries, keys, words):
    """Heads that do not divide, or another batch or size, raise a ShapeError, and nothing is broadcast silently."""
    with pytest.raises(ShapeError, match=words):
        softmax_attention(torch.zeros(queries), torch.zeros(keys), torch.zeros(keys), causal=True)


@pytest.mark.parametrize("first", [0, 62, 100])
def test_caches_with_room_are_values(first: int) -> None:
    """Tokens go into the room behind a cache's keys, and of two that go on from one cache neither sees the other's."""
    numbers = torch.arange(2.0 * 200 * 3).reshape(1, 2, 200, 3)
    cache = KeyValueCache(numbers[:, :, :first], -numbers[:, :, :first])
    with torch.inference_mode():
        for token in range(first, 140):
            here = numbers[:, :, token : token + 1]
            other = cache.with_token(here + 0.5, here)
            longer = cache.with_token(here, -here)
            assert torch.equal(other.k_BGSK[:, :, -1], here[:, :, 0] + 0.5)
            cache = longer
    assert torch.equal(cache.k_BGSK, numbers[:, :, :140]) and torch.equal(cache.v_BGSV, -numbers[:, :, :140])
    appended = cache.with_token(numbers[:, :, 140:141], numbers[:, :, 140:141])  # with gradients: a copy
    assert appended.room is None and appended.tokens == 141


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"scale": 0.4, "sinks_H": torch.arange(4.0)}, {"window": 31}, {"window": 30}])
@torch.inference_mode()
def test_tokens_after_a_cache_see_it_and_themselves(dtype: torch.dtype, options: dict[str, Any]) -> None:
    """By torch's fused kernel where no key is out of the window, and by tiles where one is."""
    q, k, v = (torch.randn(2, heads, 31, 16, dtype=dtype) for heads in (4, 2, 2))
    cache = KeyValueCache(k[:, :, :20], v[:, :, :20])
    new, given = [t[:, :, 20:] for t in (q, k, v)], SoftmaxOptions(**options)
    out_BHLV, after = softmax_attention_streaming(*new, cache, options=given)
    fused = attend_after(SoftmaxCall(*new, True, given), cache.k_BGSK, cache.v_BGSV)
    assert (fused is None) == (options.get("window") == 30)
    want_BHLV = softmax_attention_naive(q.float(), k.float(), v.float(), causal=True, **options)
    assert_close(out_BHLV, want_BHLV[:, :, 20:].to(dtype))
    assert after.tokens == 31
