"""Decode steps of downloaded models as on a GPU: over buffers that stay, and without a wait of the host."""

import pytest
import torch

from dist_attn.adapters import modules
from dist_attn.adapters.model import AdaptedModel, load_adapted_model
from dist_attn.generation import CapturedStep, StepGraphs
from dist_attn.models import ModelState
from tests.generation.test_captured_step import Recaptured, assert_same
from tests.support.closeness import assert_close
from tests.support.downloaded import llama, mamba2, qwen3_next, save
from tests.support.foreign_models import TYPES, written
from tests.support.one_device import META, OneDevice


@pytest.mark.parametrize("make", [mamba2, qwen3_next, llama])
def test_captured_steps_are_plain_steps(make, tmp_path):
    """After a prompt, logits and states are those of plain steps, with their bits where nothing has softmax."""
    model = load_adapted_model(save(make(), tmp_path / "model"))
    capture = Recaptured()
    with torch.inference_mode():
        _, state = model.hidden(torch.arange(3, 43).view(2, 20))
        captured = CapturedStep(model, state, graphs=StepGraphs(model.device, capture))
        for t in range(4):
            token_B = torch.tensor([t + 5, 3 * t + 1])
            want_BV, state = model.step(token_B, state)
            torch.testing.assert_close(
                captured.step(token_B), want_BV, **({"atol": 0, "rtol": 0} if make is mamba2 else {})
            )
    assert_same(captured.state, state)
    assert captured.how == "a CUDA graph"


EVERY_DAY = ("qwen3_next", "kimi_linear", "falcon_h1", "recurrent_gemma", "llama")


@pytest.mark.parametrize("kind", [k if k in EVERY_DAY else pytest.param(k, marks=pytest.mark.slow) for k in TYPES])
@torch.inference_mode()
def test_the_host_waits_for_nothing(kind):
    """Blocks, read-outs and steps, side by side and captured, look at no number of the device, where states stay."""
    theirs, tokens_BL = written(kind)
    model = AdaptedModel(theirs.to(torch.bfloat16)).to(META)  # products of experts have a kernel in bfloat16 alone
    with OneDevice():
        _, state = model.hidden(tokens_BL[:, :20])
        h_BLD, state = model.hidden(tokens_BL[:, 20:30], None, state)
        scores_BLV = model.readout(h_BLD)
        _, state = model.step(tokens_BL[:, 30], state)
        both = ModelState.beside([state.select(0), state.select(1)], 8)
        logits_BV, both = model.step(torch.zeros(8, dtype=torch.int64), both)
        captured = CapturedStep(model, state, graphs=StepGraphs(META, Recaptured()))
        for _ in range(3):
            captured.step(tokens_BL[:, 31])
    assert {t.device for t in (scores_BLV, logits_BV, *both.tensors(), *captured.state.tensors())} == {META}
    assert captured.how == "a CUDA graph"


@torch.no_grad()
def test_a_layer_around_another_keeps_what_it_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has the name and the weight of the other, as those of peft have, is called as it is."""

    class Linear(torch.nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(input)

    layer, x_NI = Linear(64, 64), torch.randn(32, 64)
    monkeypatch.setattr(modules, "takes_onednn_linear", lambda *_: True)
    modules.linear(layer)
    assert_close(layer(x_NI), 2 * torch.nn.functional.linear(x_NI, layer.weight, layer.bias))
