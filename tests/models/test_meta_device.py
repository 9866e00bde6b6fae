"""On `meta`, the device without numbers that every torch has: models mix no devices, and the host waits for nothing.

There `.item()`, `.tolist()`, `.cpu()` and all that looks at a number fail. What would pass is a tensor of the CPU among
others, and the copy of one for which a GPU finishes all its work first: `OneDevice` refuses both. What a GPU adds up
in another order each time is refused by `FixedOrder`.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from dist_attn.comm import Communicator, run_simulated
from dist_attn.generation import CapturedStep, StepGraphs, pack_state
from dist_attn.layout import SequenceLayout
from dist_attn.models import LanguageModel, LanguageModelConfig, ModelState, build_model
from dist_attn.ops import LocalSequenceOps, SequenceOps
from dist_attn.sharded import ShardedSequenceOps
from dist_attn.training.loop import build_task
from dist_attn.training.mesh import Share
from dist_attn.training.optim import build_optimisers
from tests.generation.test_captured_step import Recaptured
from tests.models.test_stream_encoder import PAIR, small
from tests.support.fixed_order import FixedOrder
from tests.support.model_cases import MODEL_CASES, kinds_of, model_config
from tests.support.one_device import META, OneDevice
from tests.support.snapshots import manifest
from tests.support.tasks import small_task
from tests.support.training import small_run

BATCH, LENGTH = 2, 70


def _tokens(length: int = LENGTH, device: torch.device = META) -> torch.Tensor:
    return torch.zeros(BATCH, length, dtype=torch.int64, device=device)


def _smallest(case: str) -> LanguageModel:
    """The model of this case with each of its mixers once: an operation on `meta` is a millisecond of Python."""
    config = model_config(case)
    layers = {"num_layers": len(config["mixer"].get("pattern", [0]))}
    return build_model(LanguageModelConfig.model_validate(config | layers)).eval()


def _described(state: ModelState) -> list[tuple[Any, ...]]:
    """All that can be told of a state without its numbers."""
    return [(t.shape, t.dtype, t.is_contiguous()) for layer in state.layers for t in layer.tensors()]


@pytest.mark.parametrize("case", MODEL_CASES)
def test_prefill_decode_and_backward(case: str) -> None:
    """Blocks, documents and steps leave states as on the CPU, so a snapshot holds the same arrays; gradients arrive."""
    model = _smallest(case)
    with torch.inference_mode():
        of_numbers = _states(model, case)
    stored = pack_state(of_numbers[-1].select(0), manifest()).header.arrays
    model.to(META)
    with OneDevice(), FixedOrder():
        with torch.inference_mode():
            without = _states(model, case)
        logits_BLV, _ = model(_tokens())
        logits_BLV.sum().backward()
    assert [_described(state) for state in without] == [_described(state) for state in of_numbers]
    held = [t[0] for layer in without[-1].layers for t in layer.tensors()]
    assert {t.device for t in held} == {META}
    assert [tuple(array.shape) for array in stored] == [tuple(t.shape) for t in held]
    assert all(p.grad is not None and p.grad.device == META for p in model.parameters())


def _states(model: LanguageModel, case: str) -> list[ModelState]:
    """After two blocks, the first of packed documents where the mixers take them, and after two steps, captured too.

    Behind packed documents exact attention holds the keys of the last one, a state that is not saved.
    """
    tokens_BL = _tokens(device=model.embedding.weight.device)
    packed = "softmax" not in kinds_of(case) and all(block.mixer.config.packs for block in model.blocks)
    _, first = model(tokens_BL, LocalSequenceOps((0, 20, 50) if packed else None))
    _, second = model.hidden(tokens_BL, None, first)
    _, third = model.step(torch.zeros(BATCH, dtype=torch.int64), second)  # on the CPU, as drawn tokens are
    captured = CapturedStep(model, third, graphs=StepGraphs(model.device, Recaptured()))
    for _ in range(3):
        captured.step(tokens_BL[:, 0])
    assert captured.how == "a CUDA graph"
    return [first, second, third, captured.state, model.step(tokens_BL[:, 0], third)[1]]


@torch.inference_mode()
def test_a_stream_encoder_reads_blocks() -> None:
    """Blocks of a text that goes on, and short texts together; the state lies on the device but for its position."""
    model, tokens_BL = small().float().to(META), torch.zeros(1, 1200, dtype=torch.int64)
    with OneDevice():
        _, first = model.hidden(tokens_BL[:, :PAIR])
        h_BLD, second = model.hidden(tokens_BL[:, PAIR:], None, first)
        short = model.short_hidden([tokens_BL[0, :5], tokens_BL[0, :9]])
        vectors_BD = model.sentence.encode(tokens_BL[:, :8])
    assert {h.device for h in (h_BLD, *short, vectors_BD)} == {META}
    assert {t.device for layer in second.layers for t in layer.tensors()} == {META}
    assert second.position == 1200


@pytest.mark.parametrize("case", {tuple(sorted(kinds_of(case))): case for case in reversed(MODEL_CASES)}.values())
def test_ranks_exchange_carries(case: str) -> None:
    """Three simulated ranks, one of them empty, read two blocks and go back through one; each has the whole state."""
    # The simulator passes tensors of `meta` as it does others: as many bytes of the device to each rank as it expects.
    layout = SequenceLayout.from_lengths((40, 0, 30))
    model = _smallest(case).to(META)
    with torch.inference_mode():
        want = _described(model.hidden(_tokens(), None)[1])

    def rank(comm: Communicator) -> ModelState:
        ops: SequenceOps = ShardedSequenceOps(comm, layout, cache="whole")
        tokens = _tokens(layout.lengths[comm.rank])
        with OneDevice(), FixedOrder():
            with torch.no_grad():
                _, first = model.hidden(tokens, ops)
            h_BLD, _ = model.hidden(tokens, ops, first)
            torch.autograd.grad(h_BLD.sum(), list(model.parameters()), allow_unused=True)
        return first

    for state in run_simulated(rank, 3):
        assert _described(state) == want


@pytest.mark.parametrize("kind", ["language", "labelled_text", "pairs"])
def test_training_steps(kind: str, tmp_path: Path) -> None:
    """Loss, backward pass, clipping and update of every task, on its own batches, wait for nothing."""
    config = small_run(tmp_path, dtype="float32") if kind == "language" else small_task(kind, tmp_path)
    task = build_task(config, Share(META))
    optimisers = build_optimisers(task.model, config.optimiser)
    with OneDevice(), FixedOrder():
        for step in range(2):
            task.prepare(step)
            task.loss(step, slice(0, task.batch)).backward()
            torch.nn.utils.clip_grad_norm_(task.model.parameters(), 1.0)
            for optimiser in optimisers:
                optimiser.step()
