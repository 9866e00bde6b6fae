"""Are relative attention's kernels right on this GPU? Options are those of `make gpu`, whose record it adds to.

dist-attn bench gpu-relative [--json F]     on a GPU
dist-attn bench gpu-relative --tiny         without one: that all of it runs
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial

import torch

from benchmarks import gpu_check
from benchmarks.gpu.cases import DEVICE, Cases, Row, Shape
from dist_attn.ops.linear_attention import Implementation
from dist_attn_papers.ops.relative_attention import relative_attention, relative_attention_streaming
from tests.gpu.judging import judged, name_of
from tests.gpu.kernel_cases import DTYPES
from tests.gpu.model_cases import captured_values

__all__ = ["main", "relative_case", "relative_cases"]

PROGRAM = "dist_attn_papers.gpu.relative_check"
# Each case compiles kernels of its own, for which the GPU waits.
gpu_check.PIECES["relative"] = gpu_check.Piece(0, PROGRAM, "relative_cases", 60, processes=16, program=PROGRAM)


def main(arguments: Sequence[str]) -> int:
    """The exit status of `make gpu`, of this one piece."""
    return gpu_check.main([*arguments, "--only", "relative"])


def relative_cases(*, tiny: bool) -> Cases:
    """Each form in each type, and a decode step of a model as a CUDA graph; the first word is the operation."""
    shapes = [Shape(1, 1, 8, 8, 8)] if tiny else [Shape(2, 2, 64, 64, 64), Shape(1, 2, 80, 80, 300)]
    lengths = ((20, 20, 3),) if tiny else ((1_003, 1_003, 16), (700, 1_003, 100), (1_003, 130, 0))
    found = [
        (kind, dtype, shape, *length)
        for shape in shapes
        for length in lengths
        for dtype in DTYPES
        for kind in ("causal", "full", "stream")
        if kind != "stream" or length[0] == length[1]
        # All types of the first sizes, the others in one: each case compiles kernels of its own.
        if dtype == torch.bfloat16 or (shape == shapes[0] and length == lengths[0])
    ]
    cases: Cases = {
        f"relative {kind} {name_of(dtype)} {shape.words} {queries}x{keys} k={reach}": partial(
            relative_case, kind, dtype, shape, queries, keys, reach
        )
        for kind, dtype, shape, queries, keys, reach in found
    }
    if tiny:
        cases = {name: work for name, work in cases.items() if name.startswith("relative causal float32")}
    return cases | {"relative captured step": partial(captured_values, "scaleformer", tiny)}


def _relative_inputs(shape: Shape, queries: int, keys: int, reach: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Positive features, as those of elu + 1 are, and values."""
    sizes = {
        "phi_q_BHLK": (shape.batch, shape.heads, queries, shape.head_size),
        "phi_k_BHSK": (shape.batch, shape.heads, keys, shape.head_size),
        "phi_rp_HRK": (shape.heads, 2 * reach + 1, shape.head_size),
    }
    found = {name: torch.rand(size, device=DEVICE).add(0.1).to(dtype) for name, size in sizes.items()}
    values = torch.randn(shape.batch, shape.heads, keys, shape.values, device=DEVICE, dtype=dtype)
    return found | {"v_BHSV": values}


def relative_case(kind: str, dtype: torch.dtype, shape: Shape, queries: int, keys: int, reach: int) -> Row:
    """The errors of one kind of relative attention: outputs and gradients."""
    torch.manual_seed(0)
    given = _relative_inputs(shape, queries, keys, reach, dtype)
    weight = torch.randn(shape.batch, shape.heads, queries, shape.values, device=DEVICE)
    attend: Callable[..., torch.Tensor] = _in_two_blocks if kind == "stream" else relative_attention
    options = {} if kind == "stream" else {"causal": kind == "causal"}
    found = []
    for implementation in ("streaming", "triton"):
        wide = implementation == "streaming"
        leaves = {n: (t.double() if wide else t).detach().clone().requires_grad_() for n, t in given.items()}
        out = attend(**leaves, implementation=implementation, **options)
        (out.double() * weight).sum().backward()
        found.append({"out": out, **{f"grad {name}": t.grad for name, t in leaves.items()}})
    return judged(found[0], found[1], dtype)


def _in_two_blocks(
    phi_q_BHLK: torch.Tensor,
    phi_k_BHSK: torch.Tensor,
    v_BHSV: torch.Tensor,
    phi_rp_HRK: torch.Tensor,
    implementation: Implementation,
) -> torch.Tensor:
    """A stream with a state between its blocks."""
    first = phi_q_BHLK.shape[2] // 3
    sizes = (first, phi_q_BHLK.shape[2] - first)
    outs, state = [], None
    for q, k, v in zip(*(t.split(sizes, 2) for t in (phi_q_BHLK, phi_k_BHSK, v_BHSV)), strict=True):
        out, state = relative_attention_streaming(q, k, v, phi_rp_HRK, state, implementation=implementation)
        outs.append(out)
    return torch.cat(outs, dim=2)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
