"""Prefix-LM linear attention against the oracle, and what a prefix means."""

import pytest
import torch

from dist_attn.errors import InputError
from dist_attn.ops import LocalSequenceOps, linear_attention
from dist_attn.ops.linear_attention import linear_attention_naive
from dist_attn.ops.softmax_attention import softmax_attention, softmax_attention_naive
from tests.support.attention import Inputs, weighted_sum
from tests.support.closeness import assert_close
from tests.support.sharded_call import random_tensor


@pytest.mark.parametrize(("gate", "state"), [(False, False), (True, True)])
@pytest.mark.parametrize(
    ("queries", "keys", "prefix"),
    [(9, 9, 4), (150, 150, 70), (8, 20, 5), (20, 8, 12), (6, 30, 9), (7, 7, 7), (5, 5, 99)],
)
def test_a_prefix_equals_the_oracle(queries, keys, prefix, gate, state):
    """Outputs, state and every gradient are the oracle's, for prefixes inside, at and behind the ends of both."""
    results = []
    for form in (linear_attention_naive, linear_attention):
        leaves = Inputs.random(queries, keys, gate=gate, scale=gate, state=state).leaves()
        args, kwargs = leaves.arguments()
        out, after = form(*args, **kwargs, prefix=prefix)
        weighted_sum(out, *after.tensors()[:4]).backward()
        results.append([out, *after.tensors()[:4], *leaves.gradients().values()])
    for got, want in zip(results[1], results[0], strict=True):
        assert_close(got, want, kind="gradient")


@pytest.mark.parametrize(("queries", "keys", "prefix"), [(9, 9, 4), (8, 20, 5), (20, 8, 12), (6, 30, 9), (5, 5, 99)])
def test_softmax_with_a_prefix_equals_the_oracle(queries, keys, prefix):
    """Exact attention with a prefix has the oracle's outputs and gradients, and refuses one that means nothing."""
    results = []
    for form in (softmax_attention_naive, softmax_attention):
        q, k, v = (
            random_tensor(2, heads, length, 5, seed=heads).requires_grad_()
            for heads, length in ((4, queries), (2, keys), (2, keys))
        )
        out = form(q, k, v, causal=True, prefix=prefix)
        weighted_sum(out).backward()
        results.append([out, q.grad, k.grad, v.grad])
    for got, want in zip(results[1], results[0], strict=True):
        assert_close(got, want, kind="gradient")
    with pytest.raises(InputError, match="0 or more tokens of one causal sequence"):
        softmax_attention(q, k, v, causal=False, prefix=prefix)


def test_what_a_prefix_sees():
    """Inside the prefix outputs are those of full attention over it; behind it those of causal attention."""
    args, kwargs = Inputs.random(40, 40, gate=False, scale=False, state=False).arguments()
    out, _ = LocalSequenceOps().linear_attention(*args, prefix=15, **kwargs)
    full, _ = linear_attention(*(t[:, :, :15] for t in args), causal=False, **kwargs)
    causal, _ = linear_attention(*args, causal=True, **kwargs)
    assert_close(out[:, :, :15], full)
    assert_close(out[:, :, 15:], causal[:, :, 15:])


def test_a_token_behind_the_prefix_changes_nothing_before_it():
    """Changing a token leaves all earlier outputs bit for bit, but for the prefix that it is part of."""
    (q, k, v), kwargs = Inputs.random(40, 40, gate=False, scale=False, state=False).arguments()
    changed = v.clone()
    changed[:, :, 25] += 1
    outs = [linear_attention(q, k, x, prefix=15, **kwargs)[0] for x in (v, changed)]
    assert torch.equal(outs[0][:, :, :25], outs[1][:, :, :25])
    assert not torch.equal(outs[0][:, :, 25:], outs[1][:, :, 25:])


@pytest.mark.parametrize("wrong", [{"prefix": -1}, {"prefix": 3, "causal": False}, {"prefix": 3, "documents": (0, 2)}])
def test_a_prefix_that_means_nothing_is_refused(wrong):
    """Below 0, where attention is full anyway, or over packed documents: in words."""
    args, kwargs = Inputs.random(5, 5, gate=False, scale=False, state=False).arguments()
    with pytest.raises(InputError, match="0 or more tokens of one causal sequence"):
        linear_attention(*args, **kwargs, **wrong)
