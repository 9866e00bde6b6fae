"""Sums from nothing, completed by the state before them, are linear attention from that state."""

from dataclasses import replace

import pytest
import torch

from dist_attn.ops import LinearState, linear_attention
from dist_attn.ops.linear_attention import LinearCall, SplitSequence, complete_sums, local_sums
from dist_attn.ops.linear_attention.attention import attend
from dist_attn.ops.linear_attention.block import AttentionBlock
from tests.support.attention import Inputs, weighted_sum
from tests.support.closeness import assert_close


def in_two_parts(q, k, v, *, feature_map, log_gate_BHS, key_scale_BHS, state):
    """Outputs and the state after the last key, as ranks compute them."""
    call = LinearCall(q, k, v, log_gate_BHS, key_scale_BHS, feature_map=feature_map)
    sums, segment = local_sums(call)
    return complete_sums(replace(call, state=state), sums), state.combine(segment)


@pytest.mark.parametrize("tokens", [0, 1, 300, 1100])
@pytest.mark.parametrize(("gate", "strength"), [(False, 0.0), (True, 0.01), (True, 1.0), (True, 30.0)])
def test_two_parts_are_the_whole(tokens, gate, strength):
    """Outputs, state and gradients are those of attention from the state, whether the gates keep or forget it."""
    inputs = Inputs.random(tokens, tokens, gate=gate, scale=gate, state=True)
    if gate:
        inputs.sequence["log_gate"] = inputs.sequence["log_gate"] * strength
    found = []
    for attention in (linear_attention, in_two_parts):
        leaves = inputs.leaves()
        qkv, kwargs = leaves.arguments()
        out, after = attention(*qkv, **kwargs)
        weighted_sum(out, *after.tensors()[:4]).backward()
        found.append((out, after, leaves.gradients()))
    (want, want_after, want_grads), (out, after, grads) = found
    assert_close(out, want)
    for got, field in zip(after.tensors(), want_after.tensors(), strict=True):
        assert_close(got, field, kind="state")
    for name, gradient in want_grads.items():
        assert_close(grads[name], gradient, kind="gradient", what=name)


@pytest.mark.parametrize("cuts", [(96,), (40, 96)])
def test_a_second_backward_pass_leaves_the_gradients_of_the_first(cuts):
    """Gradients of parts are written to one tensor, and each pass has its own."""
    qkv = torch.rand(3, 1, 2, 96, 8, generator=torch.Generator().manual_seed(0)).unbind()
    call = LinearCall(*(t.requires_grad_() for t in qkv))
    split, state, outputs = SplitSequence(call, cuts), None, []
    for number in range(len(cuts)):
        out, state = attend(replace(split.part(number), state=state))
        outputs.append(out)
    out = split.join(outputs)
    first = torch.autograd.grad(out.sum(), call.qkv, retain_graph=True)
    kept = [grad.clone() for grad in first]
    second = torch.autograd.grad(2 * out.sum(), call.qkv)
    assert all(torch.equal(*pair) for pair in zip(first, kept, strict=True))
    assert all(torch.equal(2 * grad, again) for grad, again in zip(first, second, strict=True))


def test_a_forgotten_state_is_not_read(monkeypatch):
    """Once every head's gates have forgotten the state before, no more of its products are computed."""
    reads = []
    complete = AttentionBlock.complete
    monkeypatch.setattr(AttentionBlock, "complete", lambda *arguments: reads.append(1) or complete(*arguments))
    q = torch.ones(1, 8, 2048, 2)  # four blocks
    call = LinearCall(q, q, q, implementation="streaming")
    sums, segment = local_sums(call)
    state = LinearState(*(t + 1.0 if t.is_floating_point() else t for t in segment.tensors()))
    for log_gate, read in ((-1.0, 1), (-1e-3, 4)):
        reads.clear()
        gates = torch.full((1, 8, 2048), log_gate)
        complete_sums(replace(call, state=state, log_gate_BHS=gates), sums)
        assert len(reads) == read
