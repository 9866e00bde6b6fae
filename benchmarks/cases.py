"""What can be measured: for each size the works that are run in turns, and how many operations ours needs at least."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

from benchmarks.peers import sdpa
from benchmarks.timing import rate_works
from dist_attn.feature_maps import Gaussian
from dist_attn.mixers import RandomFeatureConfig
from dist_attn.ops import linear_attention

__all__ = ["CASES", "OURS", "Case", "Statistic", "Works", "attention_flops", "attention_inputs", "delta_inputs"]

OURS = "ours"

HEADS, HEAD_SIZE, NUM_RANDOM = 8, 64, 64
_HEADS = {"hidden_size": HEADS * HEAD_SIZE, "num_heads": HEADS, "num_random": NUM_RANDOM}
COSTS = RandomFeatureConfig(kind="rfa", short_convolution=0, **_HEADS)
"""Formulas of the reference shape, without a short convolution."""

SIZES = (512, 2_048, 8_192, 32_768)
Works = Mapping[str, Callable[[], object]]
Statistic = Literal["median", "fastest"]


@dataclass(frozen=True)
class Case:
    """One measurement. `works(size)` holds "ours", its peers, and "matmul" and "copy", which measure the machine.

    A peer may be missing at sizes that are too large for it; `absent()` says which cannot run here at all, and why.
    Units: `flops(size)` floating-point operations of the form used, `moved_bytes(size)` what it reads and writes at the
    least; `tests` are paths from the root; `budget_s` seconds for a size, after which three rounds are enough.
    `statistic`: which of the rounds counts.
    """

    name: str
    question: str
    tests: tuple[str, ...]
    sizes: tuple[int, ...]
    works: Callable[[int], Works]
    flops: Callable[[int], float]
    moved_bytes: Callable[[int], float]
    rounds: int = 7
    budget_s: float = math.inf
    statistic: Statistic = "median"
    absent: Callable[[], Mapping[str, str]] = dict


def attention_flops(length: int) -> float:
    """Of the blocked form without gradients at the reference shape, features included."""
    flops = COSTS.prefill_flops(length)
    return length * (flops.total - flops.projections)


def tensor_bytes(length: int) -> float:
    """Of one of q, k, v and the outputs."""
    return 4.0 * HEADS * HEAD_SIZE * length


def attention_inputs(length: int, *, gradients: bool = False) -> tuple[list[torch.Tensor], Gaussian]:
    """q, k, v and the feature map of the reference shape."""
    generator = torch.Generator().manual_seed(length)
    shape = (3, 1, HEADS, length, HEAD_SIZE)
    qkv = [t.clone().requires_grad_(gradients) for t in torch.randn(shape, generator=generator)]
    return qkv, Gaussian(torch.randn(HEADS, NUM_RANDOM, HEAD_SIZE, generator=generator), unit_norm=True)


def delta_inputs(length: int, heads: int = HEADS, size: int = 128) -> list[torch.Tensor]:
    """q, k, v, log decays and beta of a gated delta rule, K = V; keys of norm 1, decays that forget some tens."""
    generator = torch.Generator().manual_seed(length)
    q, k, v = torch.randn((3, 1, heads, length, size), generator=generator)
    decay, beta = torch.randn((2, 1, heads, length), generator=generator)
    return [q / size**0.5, F.normalize(k, dim=-1), v, F.logsigmoid(decay + 3)[..., None], beta.sigmoid()]


def _forward(length: int) -> Works:
    (q, k, v), feature_map = attention_inputs(length)
    return {
        OURS: torch.no_grad()(lambda: linear_attention(q, k, v, feature_map=feature_map)[0]),
        "sdpa": torch.no_grad()(lambda: sdpa(q, k, v)),
        **rate_works(),
    }


def _backward(length: int) -> Works:
    (q, k, v), feature_map = attention_inputs(length, gradients=True)
    weight = torch.randn(v.shape)

    def differentiate(attend: Callable[[], torch.Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(attend(), (q, k, v), weight)

    return {
        OURS: differentiate(lambda: linear_attention(q, k, v, feature_map=feature_map)[0]),
        "sdpa": differentiate(lambda: sdpa(q, k, v)),
        **rate_works(),
    }


SHAPE = f"B1 H{HEADS} d{HEAD_SIZE}, {NUM_RANDOM} random vectors, float32, causal, feature map included"
TESTS = ("tests/ops/test_linear_attention.py", "tests/test_feature_maps.py", "tests/ops/test_softmax_attention.py")

CASES = {
    case.name: case
    for case in (
        Case(
            "forward",
            f"Attention without gradients against exact attention; {SHAPE}.",
            TESTS,
            SIZES,
            _forward,
            attention_flops,
            lambda length: 4 * tensor_bytes(length),
        ),
        # The backward pass computes each product's two adjoints, and the forward pass once more. It reads q, k, v and
        # the outputs' gradient and writes three gradients, after the forward pass's four tensors.
        Case(
            "backward",
            f"Attention and its gradients for q, k, v against exact attention; {SHAPE}.",
            TESTS,
            SIZES[:3],
            _backward,
            lambda length: 4 * attention_flops(length),
            lambda length: 11 * tensor_bytes(length),
        ),
    )
}
