"""What `gpu_check` runs of relative attention: correctness against torch's form in float64, times by length."""

from collections.abc import Callable
from typing import Any

import torch

from dist_attn.ops import relative_attention, relative_attention_streaming
from dist_attn.ops.linear_attention import Implementation
from dist_attn_research.gpu.cases import ACCEPTED, DEVICE, Row, Shape, largest_errors, seconds

__all__ = ["check_relative", "relative_rows"]


def _inputs(shape: Shape, queries: int, keys: int, reach: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Positive features, as those of elu + 1 are."""
    sizes = {
        "phi_q_BHLK": (shape.batch, shape.heads, queries, shape.head_size),
        "phi_k_BHSK": (shape.batch, shape.heads, keys, shape.head_size),
        "phi_rp_HRK": (shape.heads, 2 * reach + 1, shape.head_size),
    }
    found = {name: torch.rand(size, device=DEVICE).add(0.1).to(dtype) for name, size in sizes.items()}
    values = torch.randn(shape.batch, shape.heads, keys, shape.values, device=DEVICE, dtype=dtype)
    return found | {"v_BHSV": values}


def check_relative(*, tiny: bool) -> list[Row]:
    """Output and every gradient, also of a stream in two blocks: the largest errors, and whether right."""
    torch.manual_seed(0)
    shapes = [Shape(1, 1, 8, 8, 8)] if tiny else [Shape(2, 2, 64, 64, 64), Shape(1, 2, 80, 80, 300)]
    lengths = ((20, 20, 3),) if tiny else ((1_003, 1_003, 16), (700, 1_003, 100), (1_003, 130, 0))
    dtypes = (torch.float32,) if tiny else (torch.float32, torch.bfloat16, torch.float16)
    return [
        _correct(shape, *length, dtype, kind)
        for shape in shapes
        for length in lengths
        for dtype in dtypes
        for kind in ("causal", "full", "stream")
        if kind != "stream" or length[0] == length[1]
        # All types of the first sizes, the others in one: each case compiles kernels of its own.
        if dtype == torch.bfloat16 or (shape == shapes[0] and length == lengths[0])
    ]


def _correct(shape: Shape, queries: int, keys: int, reach: int, dtype: torch.dtype, kind: str) -> Row:
    given = _inputs(shape, queries, keys, reach, dtype)
    weight = torch.randn(shape.batch, shape.heads, queries, shape.values, device=DEVICE)
    found = []
    for implementation in ("streaming", "triton"):
        wide = implementation == "streaming"
        leaves = {n: (t.double() if wide else t).detach().clone().requires_grad_() for n, t in given.items()}
        out = _attend(leaves, kind, "streaming" if wide else "triton")
        (out.double() * weight).sum().backward()
        found.append({"out": out, **{f"grad {name}": t.grad for name, t in leaves.items()}})
    errors = largest_errors(*found)
    case = f"relative {kind} {str(dtype).removeprefix('torch.')} {tuple(shape)} {queries} x {keys}, k = {reach}"
    return {"case": case, "errors": errors, "right": all(error < ACCEPTED[dtype] for error in errors.values())}


def _attend(leaves: dict[str, torch.Tensor], kind: str, implementation: Implementation) -> torch.Tensor:
    q, k, v, rp = (leaves[name] for name in ("phi_q_BHLK", "phi_k_BHSK", "v_BHSV", "phi_rp_HRK"))
    if kind != "stream":
        return relative_attention(q, k, v, rp, causal=kind == "causal", implementation=implementation)
    first = q.shape[2] // 3
    parts = zip(*(t.split((first, q.shape[2] - first), 2) for t in (q, k, v)), strict=True)
    outs, state = [], None
    for part_q, part_k, part_v in parts:
        out, state = relative_attention_streaming(part_q, part_k, part_v, rp, state, implementation=implementation)
        outs.append(out)
    return torch.cat(outs, dim=2)


def relative_rows(shape: Shape, lengths: tuple[int, ...], *, tiny: bool) -> list[Row]:
    """Seconds forward, and forward and backward, in bf16 with k = 16: by the kernels, and by torch up to 8,192."""
    rows: list[Row] = []
    for length in lengths:
        given = {n: t.requires_grad_() for n, t in _inputs(shape, length, length, 16, torch.bfloat16).items()}
        row: Row = {"length": length, "reach": 16}
        for causal in (True, False):
            for name in ("kernels", "torch"):
                if name == "torch" and length > 8_192:
                    continue  # its blocks are of a CPU's cache: on a GPU it is all launches
                title = f"{name} {'causal' if causal else 'full'}"
                row |= _timed(title, given, causal, "triton" if name == "kernels" else "streaming", 1 if tiny else 10)
        rows.append(row)
    return rows


def _timed(
    title: str, given: dict[str, Any], causal: bool, implementation: Implementation, rounds: int
) -> dict[str, object]:
    def forward() -> torch.Tensor:
        return relative_attention(**given, causal=causal, implementation=implementation)

    def both() -> None:
        out = forward()
        out.backward(torch.ones_like(out))

    works: dict[str, Callable[[], object]] = {title: forward, f"{title} with backward": both}
    row: dict[str, object] = {}
    for name, work in works.items():
        try:
            with torch.set_grad_enabled(work is both):
                row[name] = seconds(work, rounds)
        except Exception as error:  # out of memory, for one
            row[name] = f"{type(error).__name__}: {error}"[:300]
    return row
