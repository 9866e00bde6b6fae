"""A matrix as 8-bit integers with one scale for each row, symmetric around 0."""

import torch

from dist_attn.errors import InputError, ShapeError

__all__ = ["LARGEST", "round_rows", "widen_rows"]

LARGEST = 127  # and -127: -128 has no counterpart, so it is never used
SMALLEST_SCALE = torch.finfo(torch.float32).tiny


def round_rows(w_OI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The nearest multiples of a scale: q [O, I] int8 and scale [O] bfloat16, w about q times scale.

    A scale is the row's largest number / 127, rounded up to a number that bfloat16 holds: fast products take scales of
    that type, and so all products are of the same weights. Every number is at most half a scale off, and a scale at
    most 1 + 2^-7 times the row's largest number / 127.

    Raises: ShapeError for what is no matrix, InputError for NaN or infinite numbers.
    """
    if w_OI.dim() != 2:
        raise ShapeError(f"weights have shape {tuple(w_OI.shape)}; rounded by rows are matrices [O, I]")
    if not bool(w_OI.isfinite().all()):
        raise InputError("the weights hold NaN or infinite numbers, which have no 8-bit form; train the model again")
    w_OI = w_OI.detach().float()
    largest_O = w_OI.abs().amax(dim=1) if w_OI.shape[1] else w_OI.new_zeros(w_OI.shape[0])
    scale_O = _up_to_bfloat16((largest_O / LARGEST).clamp_min(SMALLEST_SCALE))
    q_OI = (w_OI / scale_O[:, None].float()).round().clamp(-LARGEST, LARGEST).to(torch.int8)
    return q_OI.contiguous(), scale_O


def widen_rows(q: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The numbers that rows [..., I] stand for with their scales [...]."""
    return q.to(dtype) * scale[..., None].to(dtype)


def _up_to_bfloat16(x: torch.Tensor) -> torch.Tensor:
    """The smallest bfloat16 that is not below a positive float32."""
    near = x.bfloat16()
    above = (near.view(torch.int16) + 1).view(torch.bfloat16)
    return torch.where(near.float() < x, above, near)
