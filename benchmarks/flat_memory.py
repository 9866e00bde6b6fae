"""Whether memory is flat in the length: the most that attention holds above its inputs, outputs and gradients."""

from collections.abc import Callable, Sequence

import torch

from benchmarks.measured import Found, Panel, Table
from benchmarks.memory import TrackedMemory
from dist_attn.feature_maps import Gaussian
from dist_attn.ops import linear_attention

__all__ = [
    "MIB",
    "NAME",
    "QUESTION",
    "TESTS",
    "backward_above",
    "backward_bytes",
    "forward_above",
    "forward_bytes",
    "measure",
]

NAME = "flat-memory"
QUESTION = (
    "How many bytes of tensors does attention hold above its inputs, outputs and gradients, from 8,192 to 1,048,576 "
    "tokens? B1 H8 d64, 64 random vectors, float32, causal, feature map included."
)
TESTS = ("tests/ops/test_linear_attention.py", "tests/test_feature_maps.py", "tests/benchmarks/test_flat_memory.py")
HEADS, SIZE, NUM_RANDOM = 8, 64, 64
LENGTHS, SMOKE_LENGTHS = (8_192, 32_768, 131_072, 524_288, 1_048_576), (1_024, 2_048)
MIB = 1 << 20


def measure(smoke: bool) -> Found:
    """Count at every length; the longest needs about 13 GB for gradients."""
    lengths = SMOKE_LENGTHS if smoke else LENGTHS
    found: dict[str, dict[float, float]] = {}
    for name, count in (("forward", forward_bytes), ("backward", backward_bytes)):
        found[name] = {length: count(length) / MIB for length in lengths}
    ratios = {f"{name} MiB, most": max(of_length.values()) for name, of_length in found.items()}
    for name, of_length in found.items():
        ratios[f"{name}, longest / shortest"] = of_length[lengths[-1]] / of_length[lengths[0]]
    rows = tuple((f"{length:,}", *(f"{found[name][length]:.2f} MiB" for name in found)) for length in lengths)
    return Found(
        (Table("Bytes above inputs, outputs and gradients", ("tokens", *found), rows),),
        {name: round(value, 4) for name, value in ratios.items()},
        {f"{name} bytes at {length}": mib * MIB for name, of in found.items() for length, mib in of.items()},
        (Panel("held above inputs, outputs, gradients", "tokens", "MiB", found),),
        (
            "Counted at every operation of this thread: storages that operations made and that still live. What a "
            "kernel uses inside one operation is not seen.",
            "q, k and v repeat one token, so that a million of them take no memory; their gradients are whole.",
            "backward: the most that is held from the beginning of the forward pass to the gradients, the state before "
            "each block, which is kept for the backward pass, included.",
            "That many states are about twice the root of the number of blocks of 512 tokens, 260 KiB each.",
        ),
    )


def forward_bytes(length: int) -> int:
    """The peak of a pass without gradients, less the outputs."""
    return forward_above(_attend, _inputs(length))


def backward_bytes(length: int) -> int:
    """The peak of a forward and a backward pass, less outputs and gradients as far as these exist at that moment."""
    return backward_above(_attend, _inputs(length), torch.ones(1, 1, 1, 1))


def forward_above(attend: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor]) -> int:
    """The same of any operation on these."""
    with torch.no_grad(), TrackedMemory(*inputs) as tracked:
        out = attend(*inputs)
    return int(tracked.peak) - _bytes(out)


def backward_above(attend: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor], weight: torch.Tensor) -> int:
    """Likewise; `weight`, expanded, is the gradient of the outputs."""
    leaves = [t.requires_grad_() for t in inputs]
    with TrackedMemory(*leaves, weight) as tracked:
        out = attend(*leaves)
        gradients = torch.autograd.grad(out, leaves, weight.expand_as(out))
    return int(tracked.peak) - _bytes(out, *gradients)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return linear_attention(q, k, v, feature_map=_feature_map())[0]


def _bytes(*tensors: torch.Tensor) -> int:
    return sum(t.untyped_storage().nbytes() for t in tensors)


def _inputs(length: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [one[None].expand(1, HEADS, length, SIZE) for one in torch.randn((3, HEADS, 1, SIZE), generator=generator)]


def _feature_map() -> Gaussian:
    return Gaussian(torch.randn(HEADS, NUM_RANDOM, SIZE, generator=torch.Generator().manual_seed(0)), unit_norm=True)
