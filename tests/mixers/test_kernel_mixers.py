"""The fixed kernel elu + 1 against its definition, pair by pair."""

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError

from dist_attn.mixers import EluConfig, build_mixer
from dist_attn.ops import LocalSequenceOps
from tests.support.closeness import assert_close
from tests.support.sharded_call import random_tensor

SIZE, HEADS = 12, 3


def _heads(x_BLD: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = ((x_BLD @ part.T).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in weight.chunk(3))
    return q, k, v


def _causal_means(scores_BHLS: torch.Tensor, v_BHSV: torch.Tensor) -> torch.Tensor:
    """Means of the values up to each token by weights that need not sum to 1, heads side by side."""
    seen = scores_BHLS.tril()
    return (seen @ v_BHSV / seen.sum(-1, keepdim=True)).transpose(1, 2).flatten(2)


def test_elu_is_its_definition() -> None:
    """Without gates and convolution the outputs are means by the weights (elu(q) + 1) . (elu(k) + 1) of all pairs."""
    config = EluConfig(kind="elu", hidden_size=SIZE, num_heads=HEADS, short_convolution=0)
    mixer, x = build_mixer(config).double(), random_tensor(2, 70, SIZE, seed=0)
    got, _ = mixer(x, LocalSequenceOps())
    q, k, v = _heads(x, mixer.qkv.weight)
    scores = (F.elu(q) + 1) @ (F.elu(k) + 1).transpose(-1, -2)
    assert_close(got, _causal_means(scores, v) @ mixer.out.weight.T)


def test_elu_gates_are_those_of_rfa_gate() -> None:
    """A gated mixer follows S_t = g S_{t-1} + (1 - g) phi(k) v^T token by token, with a gate for each head."""
    config = EluConfig(kind="elu", hidden_size=SIZE, num_heads=HEADS, short_convolution=0, gated=True)
    mixer, x = build_mixer(config).double(), random_tensor(2, 20, SIZE, seed=1)
    got, _ = mixer(x, LocalSequenceOps())
    q, k, v = _heads(x, mixer.qkv.weight)
    g_BHL = torch.sigmoid(x @ mixer.gate.weight.T + mixer.gate.bias).transpose(1, 2)
    s, z, outs = torch.zeros(2, HEADS, 4, 4).double(), torch.zeros(2, HEADS, 4).double(), []
    for t in range(20):
        g, phi = g_BHL[:, :, t, None], F.elu(k[:, :, t]) + 1
        s = g[..., None] * s + (1 - g)[..., None] * phi[..., :, None] * v[:, :, t, None]
        z = g * z + (1 - g) * phi
        phi_q = F.elu(q[:, :, t]) + 1
        outs.append((phi_q[..., None] * s).sum(-2) / (phi_q * z).sum(-1, keepdim=True))
    assert_close(got, torch.stack(outs, 2).transpose(1, 2).flatten(2) @ mixer.out.weight.T)


@pytest.mark.parametrize(
    "values",
    [
        {"shared_gate": True},
        {"num_random": 8},
        {"rotary": {"size": 6}},
    ],
)
def test_options_that_do_not_fit_elu_are_refused(values: dict[str, object]) -> None:
    """A shared gate without gates, random vectors, and rotary sizes beyond a head's are refused."""
    with pytest.raises(ValidationError):
        EluConfig.model_validate({"kind": "elu", "hidden_size": SIZE, "num_heads": HEADS, **values})
