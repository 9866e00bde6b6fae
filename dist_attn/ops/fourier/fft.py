"""Fourier token mixing by the fast transform, any length."""

from typing import Literal

import torch

from dist_attn.errors import ShapeError

__all__ = ["FourierNorm", "fourier_mix"]

FourierNorm = Literal["ortho"] | None


def fourier_mix(x_BLD: torch.Tensor, *, norm: FourierNorm = None) -> torch.Tensor:
    """The real part of the Fourier transform over sequence and features, unnormalised or unitary ("ortho").

    Shapes: x [B, L, D] -> [B, L, D]; half-precision inputs are transformed in float32.
    Raises: ShapeError for another number of dimensions.
    Reference: A Unified View of Long-Sequence Models, Sec. 6.2 (FNet); the code of FNet is unnormalised.
    """
    if x_BLD.dim() != 3:
        raise ShapeError(f"x has shape {tuple(x_BLD.shape)}; needed is [B, L, D]")
    if not x_BLD.numel():
        return x_BLD.clone()
    wide = torch.promote_types(x_BLD.dtype, torch.float32)
    mixed_BLD: torch.Tensor = torch.fft.fft2(x_BLD.to(wide), dim=(1, 2), norm=norm).real
    return mixed_BLD.to(x_BLD.dtype)
