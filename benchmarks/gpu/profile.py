"""Where time goes on this GPU: the kernels of an operation, a pass and a step, by what they take."""

from collections.abc import Callable
from functools import partial

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.cases import DEVICE, Cases, Row, seconds
from benchmarks.gpu.models import ENCODER, WRITER, encode_work, step_works
from benchmarks.gpu.speed import REFERENCE, TINY, linear_work, with_gradients
from dist_attn.devices import compute_on
from dist_attn.training.config import OptimiserConfig
from dist_attn.training.evaluation import token_loss
from dist_attn.training.optim import build_optimisers
from tests.gpu.model_cases import small_gpt

__all__ = ["profile_cases"]

LISTED = 16
Work = Callable[[], object]


def profile_cases(*, tiny: bool) -> Cases:
    """Linear attention with gates, the models that ship, and a training step of some 100M parameters."""
    length, steps = (1_024, 3) if tiny else (32_768, 20)
    works: dict[str, Callable[[], Work]] = {
        "linear gated": partial(_linear, tiny),
        "training step": partial(_training_step, tiny),
        f"encode {ENCODER}": partial(encode_work, ENCODER, length, "bfloat16"),
        **{f"{how} steps": partial(_steps, how, steps) for how in ("captured", "eager")},
        f"encode {WRITER}": partial(encode_work, WRITER, length, "bfloat16"),
    }
    return {case: partial(_profiled, make) for case, make in works.items()}


def _linear(tiny: bool) -> Work:
    shape, length = (TINY, 32) if tiny else (REFERENCE, 32_768)
    return with_gradients(*linear_work(shape, length, "ours gated"))


def _steps(how: str, steps: int) -> Work:
    return step_works(1, "bfloat16", steps)[how]


def _training_step(tiny: bool) -> Work:
    """Loss, gradients and update, as `dist-attn train` takes them."""
    model, compute = small_gpt("rfa_gate", tiny).train(), compute_on(torch.device(DEVICE), "bfloat16")
    (optimiser,) = build_optimisers(model, OptimiserConfig())
    tokens_BL = torch.randint(0, 60, (2, 32) if tiny else (16, 1_024), device=DEVICE)
    first = model.initial_state(len(tokens_BL))

    def step() -> None:
        optimiser.zero_grad(set_to_none=True)
        with compute.autocast():
            h_BLD, _ = model.hidden(tokens_BL, state=first)
            loss = token_loss(model.readout, h_BLD.flatten(0, 1), tokens_BL.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()

    return step


def _profiled(make: Callable[[], Work]) -> Row:
    """Milliseconds in all and those in which the device computed, and the longest of its kernels with their calls."""
    work, cuda = make(), DEVICE == "cuda"
    taken = seconds(work, 2 if cuda else 0)
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as found:
        work()
        if cuda:
            torch.cuda.synchronize()
    kernels = [
        ((event.self_device_time_total if cuda else event.self_cpu_time_total) / 1e3, event.count, event.key[:100])
        for event in found.key_averages()
        # The calls by which the host launches them are events too.
        if not cuda or event.device_type.name == "CUDA"
    ]
    return {
        "ms": 1e3 * taken,
        "computing_ms": sum(ms for ms, _, _ in kernels),
        "launches": sum(count for _, count, _ in kernels),
        "longest": sorted(kernels, reverse=True)[:LISTED],
    }
