"""Whether memory is flat in the length: the most that attention holds above its inputs, outputs and gradients."""

from collections.abc import Callable, Sequence

import torch

from benchmarks.cases import attention_inputs
from benchmarks.measured import Found, Panel, Table
from benchmarks.memory import TrackedMemory
from dist_attn.ops import linear_attention

__all__ = ["NAME", "QUESTION", "TESTS", "held", "measure"]

NAME = "flat-memory"
QUESTION = (
    "How many bytes of tensors does attention hold above its inputs, outputs and gradients, from 8,192 to 1,048,576 "
    "tokens? B1 H8 d64, 64 random vectors, float32, causal, feature map included."
)
TESTS = ("tests/ops/test_linear_attention.py", "tests/test_feature_maps.py", "tests/benchmarks/test_flat_memory.py")
LENGTHS, SMOKE_LENGTHS = (8_192, 32_768, 131_072, 524_288, 1_048_576), (1_024, 2_048)
MIB = 1 << 20
NOTES = (
    "Counted at every operation of this thread: storages that operations made and that still live. What a "
    "kernel uses inside one operation is not seen.",
    "q, k and v repeat one token, so that a million of them take no memory; their gradients are whole.",
    "backward: the most that is held from the beginning of the forward pass to the gradients, the state before "
    "each block, which is kept for the backward pass, included.",
    "That many states are about twice the root of the number of blocks of 512 tokens, 260 KiB each.",
)

Attend = Callable[..., torch.Tensor]


def measure(smoke: bool) -> Found:
    """Count at every length; the longest needs about 13 GB for gradients."""
    lengths = SMOKE_LENGTHS if smoke else LENGTHS
    return held(_attend, _inputs, lambda v: v.new_ones(1, 1, 1, 1), lengths)


def held(
    attend: Attend,
    inputs_of: Callable[[int], Sequence[torch.Tensor]],
    weight_of: Callable[[torch.Tensor], torch.Tensor],
    lengths: Sequence[int],
) -> Found:
    """Of attention to q, k, v and more at each length; `weight_of(v)`, expanded, is the gradient of the outputs."""
    mib: dict[str, dict[float, float]] = {"forward": {}, "backward": {}}
    for length in lengths:
        inputs = inputs_of(length)
        mib["forward"][length] = _forward_bytes(attend, inputs) / MIB
        mib["backward"][length] = _backward_bytes(attend, inputs, weight_of(inputs[2])) / MIB
    ratios = {f"{way} MiB, most": max(of.values()) for way, of in mib.items()}
    ratios |= {f"{way}, longest / shortest": of[lengths[-1]] / of[lengths[0]] for way, of in mib.items()}
    rows = tuple((f"{length:,}", *(f"{of[length]:.2f} MiB" for of in mib.values())) for length in lengths)
    return Found(
        (Table("Bytes above inputs, outputs and gradients", ("tokens", *mib), rows),),
        {name: round(value, 4) for name, value in ratios.items()},
        {f"{way} bytes at {length}": value * MIB for way, of in mib.items() for length, value in of.items()},
        (Panel("held above inputs, outputs, gradients", "tokens", "MiB", mib),),
        NOTES,
    )


def _forward_bytes(attend: Attend, inputs: Sequence[torch.Tensor]) -> int:
    """The peak of a pass without gradients, less the outputs."""
    with torch.no_grad(), TrackedMemory(*inputs) as tracked:
        out = attend(*inputs)
    return int(tracked.peak) - _bytes(out)


def _backward_bytes(attend: Attend, inputs: Sequence[torch.Tensor], weight: torch.Tensor) -> int:
    """The peak of a forward and a backward pass, less outputs and gradients as far as these exist at that moment."""
    leaves = [t.requires_grad_() for t in inputs]
    with TrackedMemory(*leaves, weight) as tracked:
        out = attend(*leaves)
        gradients = torch.autograd.grad(out, leaves, weight.expand_as(out))
    return int(tracked.peak) - _bytes(out, *gradients)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return linear_attention(q, k, v, feature_map=attention_inputs(1)[1])[0]


def _bytes(*tensors: torch.Tensor) -> int:
    return sum(t.untyped_storage().nbytes() for t in tensors)


def _inputs(length: int) -> list[torch.Tensor]:
    return [t.expand(-1, -1, length, -1) for t in attention_inputs(1)[0]]
