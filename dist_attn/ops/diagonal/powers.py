"""Whole powers of complex numbers by products: exact at 0, and differentiable everywhere."""

import torch

__all__ = ["power", "powers"]


def power(a_DN: torch.Tensor, exponent: int) -> torch.Tensor:
    """a^exponent by repeated squaring; 1 for exponent 0, whatever a is."""
    result, square = torch.ones_like(a_DN), a_DN
    while exponent:
        if exponent & 1:
            result = result * square
        exponent >>= 1
        square = square * square if exponent else square
    return result


def powers(a_DN: torch.Tensor, count: int) -> torch.Tensor:
    """a^0 .. a^(count - 1), [D, N, count], by doubling: a logarithm would not do for a = 0."""
    found_DNC = torch.ones_like(a_DN)[..., None]
    next_DN1 = a_DN[..., None]
    while found_DNC.shape[2] < count:
        found_DNC = torch.cat([found_DNC, found_DNC * next_DN1], dim=2)
        next_DN1 = next_DN1 * next_DN1
    return found_DNC[..., :count]
