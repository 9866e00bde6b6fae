"""Decode steps of downloaded models over buffers that stay, as on a GPU."""

import pytest
import torch

from dist_attn.adapters.model import load_adapted_model
from dist_attn.generation import CapturedStep, StepGraphs
from tests.generation.test_captured_step import Recaptured, tensors_of
from tests.support.downloaded import llama, mamba2, qwen3_next, save

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
