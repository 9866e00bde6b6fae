"""The works of Scaleformer's Figures 4 and 5: the quadratic form, the paper's own algorithms, and ours.

Protocol of the authors' timings: batch 10, one head, d = 64, k = 16, uniform random inputs, no normalisation; Figure 4
is S_rel V alone, Figure 5 phi(Q) phi(K)^T V alone. The paper ends at L = 1,024. A work that would hold more than 4 GB
is left out.

Reference: Scaleformer (2023), Algorithms 1 and 2. Their misprints are corrected here (an index off by one in W^horizon
and V^after, the contraction of Algorithm 1), since the wrong ones compute something else in the same time.
"""

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F

from dist_attn.ops import linear_attention
from dist_attn.ops.relative_attention.numerators import CHUNK_TOKENS, numerators, numerators_around

__all__ = [
    "kernel_flops",
    "kernel_works",
    "moved_bytes",
    "naive_kernel",
    "naive_positions",
    "ours_positions",
    "position_flops",
    "position_works",
    "printed_kernel",
    "printed_positions",
]

NAIVE, PRINTED = "naive", "printed"

BATCH, SIZE, REACH = 10, 64, 16
MOST_BYTES = 4e9
FLOAT_BYTES, INDEX_BYTES = 4, 8

Works = Mapping[str, Callable[[], object]]


def position_works(length: int, *, causal: bool) -> Works:
    """Figure 4: the position scores times the values, by each of the three."""
    generator = torch.Generator().manual_seed(length)
    q, v = (torch.rand((BATCH, 1, length, SIZE), generator=generator) for _ in range(2))
    rp = torch.rand((1, 2 * REACH + 1, SIZE), generator=generator)
    columns = REACH if causal else 2 * REACH - 1
    works = {"ours": lambda: ours_positions(q, v, rp, causal)}
    if (FLOAT_BYTES * BATCH + INDEX_BYTES) * length**2 <= MOST_BYTES:
        works[NAIVE] = lambda: naive_positions(q, v, rp, causal)
    if FLOAT_BYTES * BATCH * length * columns * SIZE <= MOST_BYTES:
        works[PRINTED] = lambda: printed_positions(q, v, rp, causal)
    return works


def kernel_works(length: int, *, causal: bool) -> Works:
    """Figure 5: the kernel scores times the values; ours divides by the row sums as well."""
    generator = torch.Generator().manual_seed(length)
    q, k, v = (torch.rand((BATCH, 1, length, SIZE), generator=generator) for _ in range(3))
    works: dict[str, Callable[[], object]] = {
        "ours": torch.no_grad()(lambda: linear_attention(q, k, v, causal=causal)[0])
    }
    if FLOAT_BYTES * BATCH * length**2 <= MOST_BYTES:
        works[NAIVE] = lambda: naive_kernel(q, k, v, causal)
    if not causal or 2 * FLOAT_BYTES * BATCH * length * SIZE**2 <= MOST_BYTES:
        works[PRINTED] = lambda: printed_kernel(q, k, v, causal)
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


def printed_positions(q: torch.Tensor, v: torch.Tensor, rp: torch.Tensor, causal: bool) -> torch.Tensor:
    """Algorithm 2: running sums before and after the horizon, and V^horizon (L, 2k - 1, d) inside it."""
    length = v.shape[2]
    weights = q @ rp.transpose(-1, -2)
    cumulated = v.cumsum(2)
    before = weights[..., :1] * F.pad(cumulated, (0, 0, REACH, 0))[:, :, :length]
    ahead = 0 if causal else REACH - 1
    horizon = F.pad(v, (0, 0, REACH - 1, ahead)).unfold(2, REACH + ahead, 1)
    inside = torch.einsum("bhlj,bhldj->bhld", weights[..., 1 : REACH + 1 + ahead], horizon.contiguous())
    if causal:
        return before + inside
    later = v.sum(2, keepdim=True) - F.pad(cumulated, (0, 0, 1, 0))
    later = F.pad(later, (0, 0, 0, REACH))[:, :, REACH : REACH + length]
    return before + inside + weights[..., -1:] * later


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


def printed_kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """Algorithm 1: the running sum of all outer products (L, d, d); not causal, Q (K^T V)."""
    if not causal:
        return q @ (k.transpose(-1, -2) @ v)
    summed = (k[..., :, None] * v[..., None, :]).cumsum(2)
    return (q[..., None, :] @ summed)[..., 0, :]
