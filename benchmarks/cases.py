"""What can be measured: for each size the works that are run in turns, and how many operations ours needs at least."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from benchmarks import scaleformer
from benchmarks.peers import sdpa
from dist_attn.costs import KernelAttention
from dist_attn.feature_maps import Gaussian
from dist_attn.ops import linear_attention

__all__ = ["CASES", "MATMUL", "OURS", "Case", "Statistic"]

OURS = "ours"
MATMUL = "matmul"
MATMUL_SIZE = 768

HEADS, HEAD_SIZE, NUM_RANDOM = 8, 64, 64
SIZES = (512, 2_048, 8_192)

Works = Mapping[str, Callable[[], object]]
Statistic = Literal["median", "fastest"]


@dataclass(frozen=True)
class Case:
    """One measurement. `works(size)` holds "ours", its peers, and "matmul", whose rate sets the arithmetic limit.

    A peer may be missing at sizes that are too large for it.
    Units: `flops(size)` floating-point operations of the form used; `tests` are paths from the root; `budget_s` seconds
    for a size, after which three rounds are enough. `statistic`: which of the rounds counts. `memory`: whether the peak
    of tensors is measured too.
    """

    name: str
    question: str
    tests: tuple[str, ...]
    sizes: tuple[int, ...]
    works: Callable[[int], Works]
    flops: Callable[[int], float]
    rounds: int = 7
    budget_s: float = math.inf
    statistic: Statistic = "median"
    memory: bool = False


def matmul_flops() -> float:
    """Operations of the work "matmul"."""
    return 2.0 * MATMUL_SIZE**3


def _matmul() -> Callable[[], object]:
    a, b = torch.randn(2, MATMUL_SIZE, MATMUL_SIZE)
    return lambda: a @ b


def _attention_flops(length: int) -> float:
    mixer = KernelAttention("rfa", HEADS * HEAD_SIZE, HEADS, NUM_RANDOM, "gaussian", 0)
    return length * (mixer.prefill_flops().total - mixer.prefill_flops().projections)


def _inputs(length: int, *, gradients: bool = False) -> tuple[list[torch.Tensor], Gaussian]:
    generator = torch.Generator().manual_seed(length)
    shape = (3, 1, HEADS, length, HEAD_SIZE)
    qkv = [t.clone().requires_grad_(gradients) for t in torch.randn(shape, generator=generator)]
    return qkv, Gaussian(torch.randn(HEADS, NUM_RANDOM, HEAD_SIZE, generator=generator), unit_norm=True)


def _forward(length: int) -> Works:
    (q, k, v), feature_map = _inputs(length)
    return {
        OURS: torch.no_grad()(lambda: linear_attention(q, k, v, feature_map=feature_map)),
        "sdpa": torch.no_grad()(lambda: sdpa(q, k, v)),
        MATMUL: _matmul(),
    }


def _backward(length: int) -> Works:
    (q, k, v), feature_map = _inputs(length, gradients=True)
    weight = torch.randn(v.shape)

    def differentiate(attend: Callable[[], torch.Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(attend(), (q, k, v), weight)

    return {
        OURS: differentiate(lambda: linear_attention(q, k, v, feature_map=feature_map)[0]),
        "sdpa": differentiate(lambda: sdpa(q, k, v)),
        MATMUL: _matmul(),
    }


def _scaleformer(figure: int, *, causal: bool) -> Case:
    works_of, flops_of, what = {
        4: (scaleformer.position_works, scaleformer.position_flops, "S_rel V"),
        5: (scaleformer.kernel_works, scaleformer.kernel_flops, "phi(Q) phi(K)^T V"),
    }[figure]
    masked = "masked" if causal else "bidirectional"
    return Case(
        f"scaleformer-{figure}-{masked}",
        f"Scaleformer, Figure {figure}: {what}, {masked}, B10 H1 d64 k16, float32, without gradients: the quadratic "
        "form, the paper's own algorithm (misprints corrected), and ours. A form is left out from where it would hold "
        "more than 4 GB.",
        _SCALEFORMER_TESTS,
        _SCALEFORMER_SIZES,
        lambda length: {**works_of(length, causal=causal), MATMUL: _matmul()},
        lambda length: flops_of(length, causal=causal),
        rounds=100,
        budget_s=1.5,
        statistic="fastest",
        memory=True,
    )


_SCALEFORMER_SIZES = tuple(2**power for power in range(4, 17))
_SCALEFORMER_TESTS = (
    "tests/ops/test_relative_attention.py",
    "tests/ops/test_linear_attention.py",
    "tests/benchmarks/test_scaleformer.py",
)

_SHAPE = f"B1 H{HEADS} d{HEAD_SIZE}, {NUM_RANDOM} random vectors, float32, causal, feature map included"
_TESTS = ("tests/ops/test_linear_attention.py", "tests/test_feature_maps.py", "tests/ops/test_softmax_attention.py")

CASES = {
    case.name: case
    for case in (
        Case("forward", f"Attention without gradients against exact attention; {_SHAPE}.", _TESTS, SIZES, _forward,
             _attention_flops),
        # The backward pass computes each product's two adjoints, and the forward pass once more.
        Case("backward", f"Attention and its gradients for q, k, v against exact attention; {_SHAPE}.", _TESTS, SIZES,
             _backward, lambda length: 4 * _attention_flops(length)),
        *(_scaleformer(figure, causal=causal) for figure in (4, 5) for causal in (True, False)),
    )
}  # fmt: skip
