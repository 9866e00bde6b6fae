"""The oracle of products with narrow weights: make the numbers that they stand for, then multiply."""

import torch

__all__ = ["bfloat16_linear_naive", "int8_linear_naive"]


def int8_linear_naive(x: torch.Tensor, q_OI: torch.Tensor, scale_O: torch.Tensor) -> torch.Tensor:
    """x (q scale)^T in the precision of x, and rounded in no other way. See `int8_linear` and `int8_step_linear`."""
    w_OI = q_OI.to(x.dtype) * scale_O.to(x.dtype)[:, None]
    return x @ w_OI.T


def bfloat16_linear_naive(x: torch.Tensor, w_OI: torch.Tensor) -> torch.Tensor:
    """x w^T in the precision of x, and rounded in no other way. See `bfloat16_linear`."""
    return x @ w_OI.to(x.dtype).T
