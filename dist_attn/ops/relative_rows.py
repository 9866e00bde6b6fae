"""Sums over the pairs of tokens of each row of a table of relative positions.

Shape letters: L queries, S keys, W rows: the outermost two for all keys that lie so far away or farther.
"""

import torch


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
