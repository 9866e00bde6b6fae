"""The oracle of Fourier mixing: two products with the matrices of the discrete Fourier transform."""

import math
from typing import Literal

import torch

__all__ = ["fourier_mix_naive"]


def fourier_mix_naive(x_BLD: torch.Tensor, *, norm: Literal["ortho"] | None = None) -> torch.Tensor:
    """Re(F_L x F_D) with the transform's matrices written out; O(L^2 + D^2). See `fourier_mix`."""

    def matrix(size: int) -> torch.Tensor:
        n = torch.arange(size, dtype=torch.float64)
        angle = -2 * math.pi * torch.outer(n, n) / max(size, 1)
        return torch.polar(torch.full_like(angle, 1 / math.sqrt(max(size, 1)) if norm == "ortho" else 1.0), angle)

    length, size = x_BLD.shape[1:]
    mixed_BLD = matrix(length) @ x_BLD.to(torch.complex128) @ matrix(size)
    return mixed_BLD.real.to(x_BLD.dtype)
