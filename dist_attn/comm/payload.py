"""What of a tensor travels, and how the parts that arrive are added."""

import torch
from torch import Tensor

__all__ = ["bytes_of", "sum_in_order"]


def bytes_of(x: Tensor) -> Tensor:
    """The elements of `x` in order, as a flat uint8 tensor; may share memory with `x`."""
    flat = x.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    # One element cut out of a larger tensor counts as contiguous whatever its stride is, and cannot be viewed as bytes.
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)


def sum_in_order(parts: Tensor) -> Tensor:
    """parts[0] + parts[1] + …, from left to right, with float32 sums for half-precision parts."""
    wide = torch.float32 if parts.dtype in (torch.bfloat16, torch.float16) else parts.dtype
    total = parts[0].to(wide, copy=True)
    for part in parts[1:]:
        total += part.to(wide)
    return total.to(parts.dtype)
