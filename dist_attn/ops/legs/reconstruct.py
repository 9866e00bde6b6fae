"""The signal that a LegS memory remembers, from its coefficients."""

import torch

from dist_attn.errors import ShapeError

__all__ = ["reconstruct"]


def reconstruct(c: torch.Tensor, points_P: torch.Tensor) -> torch.Tensor:
    """The past as a polynomial of degree N - 1: its values at shares `points` of the time, 0 the first token, 1 now.

    sum_n c_n sqrt(2n + 1) P_n(2x - 1), the Legendre polynomials by their recurrence, which is stable on [0, 1].

    Shapes: c [..., N], points [P] -> [..., P].
    Cost: 2 N P multiplications per signal.
    Raises: ShapeError for points that are no row.
    Reference: Gu et al. 2020 (HiPPO), LegS; A Unified View of Long-Sequence Models, Sec. 7.
    """
    if points_P.dim() != 1:
        raise ShapeError(f"points have shape {tuple(points_P.shape)}; needed is [P]")
    x_P = 2 * points_P.to(c.dtype) - 1
    rows = [torch.ones_like(x_P), x_P]
    for n in range(1, c.shape[-1]):
        rows.append(((2 * n + 1) * x_P * rows[n] - n * rows[n - 1]) / (n + 1))
    basis_NP = torch.stack(rows[: c.shape[-1]])
    scale_N = (2 * torch.arange(c.shape[-1], dtype=c.dtype, device=c.device) + 1).sqrt()
    return (c * scale_N) @ basis_NP
