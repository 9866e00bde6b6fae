"""Constant folding: operations on weights alone run once, give the same bits, and are never written over."""

import gc
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from dist_attn.generation import CapturedStep, StepGraphs
from dist_attn.generation.constant_folding import ConstantFolding
from tests.generation.test_captured_step import MIXERS, Recaptured, model_of, tensors_of, tokens_of


class Calls(TorchDispatchMode):
    """Counts the operations that run, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", list(MIXERS))
def test_steps_have_the_same_bits(kind: str) -> None:
    """Folded or not, steps under autocast give the same logits and states; the second one casts no weight."""
    model = model_of(kind).cpu()
    folding, counts = ConstantFolding((*model.parameters(), *model.buffers())), []
    folded = plain = model.initial_state(2)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        for token_B in tokens_of(model, 3):
            with Calls() as calls, folding:
                got_BV, folded = model.step(token_B.cpu(), folded)
            want_BV, plain = model.step(token_B.cpu(), plain)
            assert torch.equal(got_BV, want_BV)
            counts.append(calls.counts["aten::to"])
    assert all(torch.equal(a, b) for a, b in zip(tensors_of(folded), tensors_of(plain), strict=True))
    linear = sum(isinstance(module, nn.Linear) for module in model.modules())
    assert counts[0] - counts[1] >= linear - 2 and counts[1] == counts[2]  # gates are not cast


def test_graphs_share_what_is_made_of_weights() -> None:
    """The second graph of a model finds its weights cast."""
    model = model_of("gated_delta").cpu()
    graphs, counts = StepGraphs(torch.device("cpu"), Recaptured()), []
    for _ in range(2):
        with Calls() as calls, torch.autocast("cpu", torch.bfloat16):
            captured = CapturedStep(model, model.initial_state(2), graphs=graphs)
            for token_B in tokens_of(model, 2):
                captured.step(token_B.cpu())
        assert captured.how == "a CUDA graph"
        counts.append(calls.counts["aten::to"])
    linear = sum(isinstance(module, nn.Linear) for module in model.modules())
    assert counts[0] - counts[1] >= linear - 2


def test_what_is_made_of_weights_goes_with_the_last_graph() -> None:
    """Rounded weights take memory that nobody planned for once there are no sessions."""
    model = model_of("gated_delta").cpu()
    graphs = StepGraphs(torch.device("cpu"), Recaptured())
    with torch.autocast("cpu", torch.bfloat16):
        captured = CapturedStep(model, model.initial_state(2), graphs=graphs)
        for token_B in tokens_of(model, 2):
            captured.step(token_B.cpu())
    (kept,) = map(weakref.ref, graphs._foldings.values())
    assert kept() is not None
    del captured
    gc.collect()
    assert kept() is None


@torch.inference_mode()
def test_what_may_be_written_to_is_made_each_time() -> None:
    """Copies and new memory are no constants, and no more are results that are larger than the weights."""
    weight, small = torch.arange(6.0), torch.arange(4, dtype=torch.int8)
    with ConstantFolding([weight, small]):
        for _ in range(2):
            assert weight.clone().add_(1).tolist() == [1, 2, 3, 4, 5, 6]
            assert weight.new_zeros(2).add_(1).tolist() == [1, 1]
            assert torch.ones_like(weight).mul_(2).sum() == 12
        assert weight.exp() is weight.exp()
        assert weight[2:].exp() is weight[2:].exp() is not weight[:4].exp()
        assert small.bfloat16() is not small.bfloat16()


@torch.inference_mode()
@pytest.mark.parametrize("write", [lambda w: w.add_(1), lambda w: w[1:].exp().mul_(2), lambda w: torch.exp(w, out=w)])
def test_constants_are_not_written_to(write: Any) -> None:
    """Whoever writes into weights, or into what was made of them, is refused before anything is written."""
    weight = torch.arange(3.0)
    with ConstantFolding([weight]), pytest.raises(RuntimeError, match="writes into weights"):
        write(weight)
    assert weight.tolist() == [0, 1, 2]
