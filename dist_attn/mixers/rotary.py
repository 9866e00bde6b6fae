"""Rotary positions: queries and keys turned by an angle that grows with their position, so scores see distances."""

import torch

from dist_attn.mixers.head_config import RotaryConfig

__all__ = ["rotate"]


def rotate(x_BHLK: torch.Tensor, positions_BL: torch.Tensor, rotary: RotaryConfig | None) -> torch.Tensor:
    """Turn the pairs (i, i + size / 2) of each head by position * base^(-2i / size); None: nothing turns.

    Shapes: x [B, H, L, K], positions [B, L] or [1, L] (integers) -> [B, H, L, K] in the type of x. Angles are computed
        in float64 so that position 1,000,000 keeps its digits.
    Reference: Su et al. 2021 (RoFormer), Eq. 15, with the two halves of a head in the place of neighbours.
    """
    if rotary is None:
        return x_BHLK
    half = rotary.size // 2
    exponents = torch.arange(half, dtype=torch.float64, device=x_BHLK.device) / half
    angles_BLN = positions_BL.to(x_BHLK.device, torch.float64)[..., None] * rotary.base**-exponents
    dtype = torch.promote_types(x_BHLK.dtype, torch.float32)
    cos_B1LN, sin_B1LN = (t.to(dtype)[:, None] for t in (angles_BLN.cos(), angles_BLN.sin()))
    first, second, rest = x_BHLK.split([half, half, x_BHLK.shape[-1] - rotary.size], dim=-1)
    turned = (first * cos_B1LN - second * sin_B1LN, second * cos_B1LN + first * sin_B1LN)
    return torch.cat([t.to(x_BHLK.dtype) for t in turned] + [rest], dim=-1)
