"""Decode steps of downloaded models as on a GPU: over buffers that stay, and without a wait of the host."""

import pytest
import torch

from dist_attn.adapters.model import AdaptedModel, load_adapted_model
from dist_attn.generation import CapturedStep, StepGraphs
from dist_attn.models import ModelState
from tests.generation.test_captured_step import Recaptured, tensors_of
from tests.support.downloaded import llama, mamba2, qwen3_next, save
from tests.support.foreign_models import TYPES, written
from tests.support.one_device import META, OneDevice

HOW = {mamba2: "a CUDA graph", qwen3_next: "the state grows", llama: "the state grows"}


@pytest.mark.parametrize("make", HOW)
def test_captured_steps_are_plain_steps(make, tmp_path):
    """After a prompt, logits and states have the bits of plain steps; what has no softmax is captured."""
    model = load_adapted_model(save(make(), tmp_path / "model"))
    capture = Recaptured()
    with torch.inference_mode():
        _, state = model.hidden(torch.arange(3, 43).view(2, 20))
        captured = CapturedStep(model, state, graphs=StepGraphs(model.device, capture))
        for t in range(4):
            token_B = torch.tensor([t + 5, 3 * t + 1])
            want_BV, state = model.step(token_B, state)
            assert torch.equal(captured.step(token_B), want_BV)
    assert all(torch.equal(a, b) for a, b in zip(tensors_of(captured.state), tensors_of(state), strict=True))
    assert HOW[make] in captured.how


EVERY_DAY = ("qwen3_next", "kimi_linear", "falcon_h1", "recurrent_gemma", "llama")


@pytest.mark.parametrize("kind", [k if k in EVERY_DAY else pytest.param(k, marks=pytest.mark.slow) for k in TYPES])
@torch.inference_mode()
def test_the_host_waits_for_nothing(kind):
    """Blocks, read-outs and steps, side by side too, look at no number on the device, where all of the state stays."""
    theirs, tokens_BL = written(kind)
    model = AdaptedModel(theirs.to(torch.bfloat16)).to(META)  # products of experts have a kernel in bfloat16 alone
    with OneDevice():
        _, state = model.hidden(tokens_BL[:, :20])
        h_BLD, state = model.hidden(tokens_BL[:, 20:30], None, state)
        scores_BLV = model.readout(h_BLD)
        _, state = model.step(tokens_BL[:, 30], state)
        both = ModelState.beside([state.select(0), state.select(1)], 8)
        logits_BV, both = model.step(torch.zeros(8, dtype=torch.int64), both)
    assert {t.device for t in (scores_BLV, logits_BV, *both.tensors())} == {META}
