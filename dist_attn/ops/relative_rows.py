"""Rows of a table of relative positions: taken for every pair of tokens, and the sums over the pairs of each row.

Shape letters: L queries, S keys, W rows: the outermost two for all keys that lie so far away or farther.
"""

from typing import Any

import torch
from torch.autograd import Function

__all__ = ["sum_by_row", "take_by_row"]


def take_by_row(by_row_LW: torch.Tensor, rows_LS: torch.Tensor) -> torch.Tensor:
    """Look up what each query has for the row of each key; gradients are added up by `sum_by_row`.

    Shapes: [..., L, W] and the rows int64 [..., L, S], expanded to it -> [..., L, S].
    """
    taken: torch.Tensor = _Taken.apply(by_row_LW, rows_LS)  # type: ignore[no-untyped-call]
    return taken


def sum_by_row(x_LS: torch.Tensor, rows_LS: torch.Tensor, width: int) -> torch.Tensor:
    """For each query the sums over the keys of each row, which stand at positions of their own.

    Then every row but the outermost has one key at most, which is copied: scatter_add is atomic on GPUs, and adds in
    an order that differs from run to run.

    Shapes: [..., L, S] and the rows int64 [..., L, S], expanded to it -> [..., L, W].
    """
    if width == 1:
        return x_LS.sum(dim=-1, keepdim=True)
    copied_LW = x_LS.new_zeros((*x_LS.shape[:-1], width)).scatter(-1, rows_LS.expand_as(x_LS), x_LS)
    first_L1, last_L1 = (x_LS.masked_fill(rows_LS != row, 0.0).sum(dim=-1, keepdim=True) for row in (0, width - 1))
    return torch.cat([first_L1, copied_LW[..., 1:-1], last_L1], dim=-1)


class _Taken(Function):
    """`gather`, whose own gradient is a scatter_add."""

    @staticmethod
    def forward(ctx: Any, by_row_LW: torch.Tensor, rows_LS: torch.Tensor) -> Any:
        ctx.save_for_backward(rows_LS)
        ctx.width = by_row_LW.shape[-1]
        return by_row_LW.gather(-1, rows_LS.expand(*by_row_LW.shape[:-1], -1))

    @staticmethod
    def backward(ctx: Any, grad_LS: torch.Tensor) -> Any:
        (rows_LS,) = ctx.saved_tensors
        return sum_by_row(grad_LS, rows_LS, ctx.width), None
