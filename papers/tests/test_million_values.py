"""The values of the million-scale model: against its definition token by token, and against golden vectors."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dist_attn.models import build_model
from dist_attn.ops import LocalSequenceOps
from dist_attn_papers.million.config import MillionConfig, RouterConfig
from dist_attn_papers.million.experts import ExpertLayer
from dist_attn_papers.million.model import MillionModel
from papers.tests.support.million_by_definition import ByDefinition, million_by_definition
from papers.tests.test_million import CASES, SMALL, TOTAL, VOCAB
from tests.support.closeness import assert_close
from tests.support.golden import golden
from tests.support.over_ranks import randomised

pytestmark = pytest.mark.slow

STEP = 30
# What else changes a value: a hidden layer and a limit under noise, other penalties and schedules, two experts' gates.
MORE: dict[str, dict[str, Any]] = {
    "gumbel, limited": {
        "selector": {
            "gate": "gumbel", "hidden_size": 5, "most_tokens": 5, "threshold": 0.3, "seed": 7, "rate_warmup": 100,
            "temperature": 0.9, "final_temperature": 0.2, "anneal_steps": 50,
        },
        "router": {"num_experts": 4, "choices": 2, "capacity_factor": 0.8},
        "context": 4,
        "num_layers": 2,
    },
    "straight_through, above": {
        "selector": {"gate": "straight_through", "rate_penalty": "above", "rate": 0.05, "rate_weight": 3.0},
        "router": {"num_experts": 2},
        "pooling": "all",
        "upsampling": {"kind": "knn"},
    },
    "adversarial": {"objective": "adversarial", "selector": {"gate": "soft"}, "router": {"num_experts": 2}},
}  # fmt: skip


def _model(case: str, training: bool) -> MillionModel:
    model = randomised(build_model(MillionConfig.model_validate({**SMALL, **(CASES | MORE)[case]})))
    model.prepare(STEP)
    return model.train(training)


def _losses(model: MillionModel, logits_C: Tensor, hidden_LD: Tensor, balance: Tensor, rate: Tensor) -> list[Tensor]:
    """What is learnt for, and the rate term apart: all outputs enter with numbers of their own."""
    g = torch.Generator().manual_seed(3)
    at_hidden = (torch.randn(hidden_LD.shape, generator=g, dtype=torch.float64) * hidden_LD).sum()
    likelihood = F.cross_entropy(logits_C[None], torch.tensor([1]))
    return [likelihood + 0.1 * at_hidden + model.config.router.balance_weight * balance, rate]


def _gradients(losses: list[Tensor], parameters: dict[str, Tensor], *, against: bool) -> dict[str, Tensor]:
    """Of the sum; `against`: of the first one, the Selector's are turned round (Eq. 28)."""
    found = {}
    for name, parameter in parameters.items():
        first, rate = (
            torch.autograd.grad(loss, parameter, retain_graph=True, materialize_grads=True)[0] if loss.requires_grad
            else torch.zeros_like(parameter)
            for loss in losses
        )  # fmt: skip
        found[name] = (-first if against and name.startswith("selector.") else first) + rate
    return found


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("case", [*CASES, *MORE])
def test_the_model_is_its_definition(case: str, training: bool) -> None:
    """Logits, vectors of all positions, kept and dropped tokens, side losses and all gradients are the definition's."""
    model, draw = _model(case, training), 5
    tokens = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(8))[:TOTAL]
    parameters = dict(model.named_parameters())
    want: ByDefinition = million_by_definition(
        model.config, parameters, tokens.tolist(), training=training, step=STEP, draw=draw
    )
    reading = model.read(tokens, LocalSequenceOps(), draw)
    logits, hidden, rate = model.classify(reading), model.spread(reading), model.selector.rate_loss(reading.open_share)
    assert reading.selected.position_N.tolist() == want.kept
    assert (reading.tally.kept, reading.tally.dropped) == (len(want.kept), want.dropped)
    for what, got, wanted in (
        ("logits", logits, want.logits_C),
        ("hidden", hidden, want.hidden_LD),
        ("balance", reading.balance, want.balance),
        ("rate", rate, want.rate_loss),
        ("beside", model.side_loss(reading), want.rate_loss + model.config.router.balance_weight * want.balance),
    ):
        assert_close(got, wanted, what=what)
    against = model.config.objective == "adversarial"
    got_gradients = _gradients(_losses(model, logits, hidden, reading.balance, rate), parameters, against=False)
    want_losses = _losses(model, want.logits_C, want.hidden_LD, want.balance, want.rate_loss)
    for name, gradient in _gradients(want_losses, parameters, against=against).items():
        assert_close(got_gradients[name], gradient, kind="gradient", what=name)


class _LinearExpert(nn.Module):
    """An expert of the golden vectors: a matrix for each token, whatever it weighs."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x_RD: Tensor, weight_R: Tensor) -> Tensor:
        return x_RD @ self.weight.T


def test_golden_layer_of_experts() -> None:
    """With the golden router and experts a layer adds the golden outputs; balance and drops are the golden ones."""
    g = golden("system")
    size, num_experts = g["Wr"].shape
    config = RouterConfig(num_experts=num_experts, capacity_factor=1.1)
    layer = ExpertLayer(config, size, 1, size).double()
    layer.router_norm = nn.Identity()
    with torch.no_grad():
        layer.router.weight.copy_(g["Wr"].T)
    layer.experts = nn.ModuleList(_LinearExpert(weight) for weight in g["We"])
    x = g["Xr"]
    assert layer.capacity(len(x)) == int(g["cap"])
    z, balance, dropped = layer(x, torch.ones(len(x), dtype=torch.float64), LocalSequenceOps())
    assert_close(z - x, g["moe_out"], kind="golden")
    assert_close(balance, g["aux"][0], kind="golden")
    assert dropped == int((g["slot"] < 0).sum()) > 0
