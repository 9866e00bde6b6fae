"""Position encodings that are added to the token embeddings."""

import math

import torch

__all__ = ["sinusoidal"]


def sinusoidal(positions_L: torch.Tensor, size: int) -> torch.Tensor:
    """Fixed sinusoids, interleaved sin and cos, wave lengths from 2 pi to 10,000 * 2 pi.

    Shapes: positions [...] (integers) -> [..., size] float32, computed in float64 so that position 1,000,000 keeps
        its digits.
    Reference: Vaswani et al. 2017, Sec. 3.5.
    """
    half = (size + 1) // 2
    rates = torch.exp(torch.arange(half, dtype=torch.float64) * (-2.0 * math.log(10_000.0) / size))
    angles = positions_L.to(torch.float64)[..., None] * rates.to(positions_L.device)
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2)[..., :size].float()
