"""The cases of Scaleformer's Figures 4 and 5: the quadratic form and ours.

Protocol of the authors' timings: batch 10, one head, d = 64, k = 16, uniform random inputs, no normalisation; Figure 4
is S_rel V alone, Figure 5 phi(Q) phi(K)^T V alone. The paper ends at L = 1,024. A work that would hold more than 4 GB
is left out.
"""

from collections.abc import Callable

import torch

from benchmarks.cases import Case
from benchmarks.timing import rate_works
from dist_attn.ops import linear_attention
from dist_attn_papers.ops.relative_attention.numerators import CHUNK_TOKENS, numerators, numerators_around

__all__ = [
    "CASES",
    "kernel_flops",
    "kernel_inputs",
    "kernel_works",
    "moved_bytes",
    "naive_kernel",
    "naive_positions",
    "ours_positions",
    "position_flops",
    "position_inputs",
    "position_works",
]

TESTS = (
    "papers/tests/test_relative_attention.py",
    "tests/ops/test_linear_attention.py",
    "papers/tests/test_scaleformer_times.py",
)
BATCH, SIZE, REACH = 10, 64, 16
MOST_BYTES = 4e9
FLOAT_BYTES, INDEX_BYTES = 4, 8


def position_inputs(length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, values and the embeddings of relative positions."""
    generator = torch.Generator().manual_seed(length)
    q, v = (torch.rand((BATCH, 1, length, SIZE), generator=generator) for _ in range(2))
    return q, v, torch.rand((1, 2 * REACH + 1, SIZE), generator=generator)


def position_works(length: int, *, causal: bool) -> dict[str, Callable[[], object]]:
    """Figure 4: the position scores times the values, by both."""
    q, v, rp = position_inputs(length)
    works: dict[str, Callable[[], object]] = {"ours": lambda: ours_positions(q, v, rp, causal)}
    if (FLOAT_BYTES * BATCH + INDEX_BYTES) * length**2 <= MOST_BYTES:
        works["naive"] = lambda: naive_positions(q, v, rp, causal)
    return works


def kernel_inputs(length: int) -> list[torch.Tensor]:
    """Queries, keys and values."""
    generator = torch.Generator().manual_seed(length)
    return [torch.rand((BATCH, 1, length, SIZE), generator=generator) for _ in range(3)]


def kernel_works(length: int, *, causal: bool) -> dict[str, Callable[[], object]]:
    """Figure 5: the kernel scores times the values; ours divides by the row sums as well."""
    q, k, v = kernel_inputs(length)
    works: dict[str, Callable[[], object]] = {
        "ours": torch.no_grad()(lambda: linear_attention(q, k, v, causal=causal)[0])
    }
    if FLOAT_BYTES * BATCH * length**2 <= MOST_BYTES:
        works["naive"] = lambda: naive_kernel(q, k, v, causal)
    return works


def position_flops(length: int, *, causal: bool) -> float:
    """Of our form: the scores of each query for every relative index, and the window and chunk times the values."""
    sides = 1 if causal else 2
    rows, columns = sides * REACH + 1, CHUNK_TOKENS + sides * REACH
    return 2.0 * BATCH * length * SIZE * (rows + columns)


def kernel_flops(length: int, *, causal: bool) -> float:
    """Of our form: state written and read, and inside chunks half of a square when causal."""
    state = 4.0 * SIZE * (SIZE + 1)
    return BATCH * length * (state + (CHUNK_TOKENS * (2.0 * SIZE + 1) if causal else 0.0))


def moved_bytes(length: int, *, tensors: int) -> float:
    """Of so many tensors [B, L, d] that are read or written once."""
    return float(tensors * FLOAT_BYTES * BATCH * length * SIZE)


def naive_positions(q: torch.Tensor, v: torch.Tensor, rp: torch.Tensor, causal: bool) -> torch.Tensor:
    """S_rel by its definition, then its product with V."""
    length = v.shape[2]
    row_LL = torch.arange(length)[None, :] - torch.arange(length)[:, None]
    row_LL = row_LL.clamp_(-REACH, REACH).add_(REACH)
    scores = (q @ rp.transpose(-1, -2)).gather(-1, row_LL.expand(*q.shape[:2], length, length))
    return (scores.tril_() if causal else scores) @ v


def ours_positions(q: torch.Tensor, v: torch.Tensor, rp: torch.Tensor, causal: bool) -> torch.Tensor:
    """The windowed form, without keys and without the division."""
    with torch.no_grad():
        if causal:
            return numerators(q, None, v, rp[:, : REACH + 1], own=True)
        return numerators_around(q, v, rp)


def naive_kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """The score matrix, then its product with V."""
    scores = q @ k.transpose(-1, -2)
    return (scores.tril_() if causal else scores) @ v


def _case(figure: int, *, causal: bool) -> Case:
    works_of, flops_of, what = {
        4: (position_works, position_flops, "S_rel V"),
        5: (kernel_works, kernel_flops, "phi(Q) phi(K)^T V"),
    }[figure]
    masked = "masked" if causal else "bidirectional"
    return Case(
        f"scaleformer-{figure}-{masked}",
        f"Scaleformer, Figure {figure}: {what}, {masked}, B10 H1 d64 k16, float32, without gradients: the quadratic "
        "form and ours. A form is left out from where it would hold more than 4 GB.",
        TESTS,
        tuple(2**power for power in range(4, 17)),
        lambda length: {**works_of(length, causal=causal), **rate_works()},
        lambda length: flops_of(length, causal=causal),
        # Queries, values, keys where there are any, and the outputs.
        lambda length: moved_bytes(length, tensors=figure - 1),
        rounds=100,
        budget_s=1.5,
        statistic="fastest",
    )


CASES = {case.name: case for figure in (4, 5) for causal in (True, False) for case in (_case(figure, causal=causal),)}
