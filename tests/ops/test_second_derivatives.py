"""Linear attention under `create_graph`: the same gradients, and the oracle's second derivatives."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dist_attn.ops import linear_attention
from dist_attn.ops.linear_attention import linear_attention_naive
from tests.support.attention import Inputs, weighted_sum
from tests.support.closeness import assert_close


def _linear(attention: Callable[..., object], length: int, causal: bool) -> tuple[Tensor, list[Tensor]]:
    """A scalar that is linear in the outputs and in the final state, and all leaves that it depends on."""
    leaves = Inputs.random(length, length, gate=True, scale=True, state=True).leaves()
    args, kwargs = leaves.arguments()
    out, after = attention(*args, **kwargs, causal=causal)
    return weighted_sum(out, *after.tensors()[:4]), [*leaves.sequence.values(), *leaves.replicated.values()]


FORMS = {
    "linear": (_linear, linear_attention, linear_attention_naive),
}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("op", FORMS)
def test_a_gradient_penalty_has_the_oracles_gradient(op: str, causal: bool) -> None:
    """The gradient of the squared gradient equals the oracle's, although the loss is linear in the outputs."""
    # There the incoming gradient is a constant, so a backward pass that is not differentiable would go unnoticed.
    case, fast, naive = FORMS[op]
    results = []
    for attention in (naive, fast):
        loss, leaves = case(attention, 150, causal)
        first = torch.autograd.grad(loss, leaves, create_graph=True)
        penalty = sum((g.square().sum() for g in first), start=torch.zeros((), dtype=torch.float64))
        results.append(torch.autograd.grad(penalty, leaves, allow_unused=True, materialize_grads=True))
    for got, want in zip(results[1], results[0], strict=True):
        assert_close(got, want, kind="gradient")


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("op", FORMS)
def test_create_graph_changes_no_gradient(op: str, causal: bool) -> None:
    """With `create_graph` and without, over several blocks, the gradients are equal."""
    case, fast, _ = FORMS[op]
    results = []
    for create_graph in (False, True):
        loss, leaves = case(fast, 1200, causal)
        results.append(torch.autograd.grad(loss, leaves, create_graph=create_graph))
    for got, want in zip(results[1], results[0], strict=True):
        assert_close(got, want, kind="gradient")
