"""Rows of a table of relative positions, taken for every pair of tokens.

Shape letters: L queries, S keys, W rows: the outermost two for all keys that lie so far away or farther.
"""

from typing import Any

import torch
from torch.autograd import Function

from dist_attn.ops.softmax_attention.tiled import sum_by_row

__all__ = ["take_by_row"]


def take_by_row(by_row_LW: torch.Tensor, rows_LS: torch.Tensor) -> torch.Tensor:
    """Look up what each query has for the row of each key; gradients are added up by `sum_by_row`.

    Shapes: [..., L, W] and the rows int64 [..., L, S], expanded to it -> [..., L, S].
    """
    taken: torch.Tensor = _Taken.apply(by_row_LW, rows_LS)  # type: ignore[no-untyped-call]
    return taken


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
