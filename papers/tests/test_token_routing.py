"""Routing of tokens to experts: the fast form against the oracle and the golden vectors; who is dropped."""

import pytest
import torch

from dist_attn.errors import InputError, ShapeError
from dist_attn_papers.ops.token_routing import route_tokens, route_tokens_naive
from tests.support.closeness import assert_close
from tests.support.golden import golden


def _choices(tokens: int, experts: int, choices: int) -> torch.Tensor:
    """Different experts for each token, the first ones oftener."""
    generator = torch.Generator().manual_seed(tokens)
    weights = 1.0 / torch.arange(1, experts + 1).expand(max(tokens, 1), experts)
    return torch.multinomial(weights, choices, generator=generator)[:tokens]


@pytest.mark.parametrize(("experts", "choices"), [(1, 1), (3, 1), (5, 2)])
@pytest.mark.parametrize(("tokens", "capacity"), [(0, 2), (1, 1), (17, 3), (17, 40)])
def test_fast_equals_oracle(tokens, capacity, experts, choices):
    """Rows of every expert, what comes back to each token and the gradient equal the oracle's, over capacity or not."""
    expert = _choices(tokens, experts, choices)
    x = torch.randn(tokens, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()
    want_rows, slot = route_tokens_naive(x, expert, num_experts=experts, capacity=capacity)
    routed = route_tokens(x, expert, num_experts=experts, capacity=capacity)
    for got, want in zip(routed.by_expert(), want_rows, strict=True):
        assert_close(got, want, kind="exact")
    assert routed.dropped == int((slot < 0).sum())
    back = routed.restore_order(2.0 * routed.x_RC)
    want_back = 2.0 * x * (slot.T[..., None] >= 0)
    assert_close(back, want_back, kind="exact")
    (gradient,) = torch.autograd.grad((back.square()).sum() + 0 * x.sum(), x)
    assert_close(gradient, 8.0 * x * (slot >= 0).sum(dim=1, keepdim=True))


def test_golden_router():
    """Golden choices, slots and outputs of Switch routing come out, dropped tokens with zeros."""
    g = golden("system")
    x, capacity = g["Xr"], int(g["cap"])
    probabilities = torch.softmax(x @ g["Wr"], dim=-1)
    assert_close(probabilities, g["probs"], kind="golden")
    gate, expert = probabilities.topk(1, dim=-1)
    assert_close(expert[:, 0], g["top"], kind="exact")
    _, slot = route_tokens_naive(x, expert, num_experts=3, capacity=capacity)
    assert_close(slot[:, 0], g["slot"], kind="exact")
    routed = route_tokens(x, expert, num_experts=3, capacity=capacity)
    made = torch.cat([rows @ weights.T for rows, weights in zip(routed.by_expert(), g["We"], strict=True)])
    assert_close(gate * routed.restore_order(made)[0], g["moe_out"], kind="golden")
    assert routed.dropped == int((g["slot"] < 0).sum())


def test_golden_mean_over_all_experts():
    """The mean of all experts' gated answers to every token is the golden one of Eq. 27 as printed."""
    g = golden("system")
    gate, expert = torch.softmax(g["Xr"] @ g["Wr"], dim=-1).topk(3, dim=-1)
    routed = route_tokens(g["Xr"], expert, num_experts=3, capacity=len(expert))
    made = torch.cat([rows @ weights.T for rows, weights in zip(routed.by_expert(), g["We"], strict=True)])
    mean = (gate.T[..., None] * routed.restore_order(made)).mean(dim=0)
    assert_close(mean, g["dense_eq27"], kind="golden")


def test_what_cannot_be_routed_is_refused():
    """Choices of another number of tokens, experts that there are not and no capacity are refused."""
    x, expert = torch.zeros(3, 2), torch.zeros(3, 1, dtype=torch.int64)
    with pytest.raises(ShapeError, match=r"needed are \[N, C\] and int64 \[N, K\]"):
        route_tokens(x, expert[:2], num_experts=2, capacity=1)
    with pytest.raises(InputError, match="experts 2 to 2 were chosen; there are 0 to 1"):
        route_tokens(x, expert + 2, num_experts=2, capacity=1)
    with pytest.raises(InputError, match="needed is 1 or more"):
        route_tokens(x, expert, num_experts=2, capacity=0)
