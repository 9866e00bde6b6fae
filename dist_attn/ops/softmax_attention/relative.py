"""Shaw's relative positions in softmax attention: learned vectors for how far a key stands from its query."""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from dist_attn.errors import ShapeError

__all__ = ["RelativePositions", "Tables", "add_by_row", "sum_by_row", "tables_of"]


@dataclass(frozen=True, eq=False)
class RelativePositions:
    """Keys become k_j + keys[n] and values v_j + values[n], where n = clip(j - i, -reach, reach) for a query at i.

    Shapes: keys [H, R, K] and values [H, R, V] or None, R = 2 reach + 1; row r stands for n = r - reach, so the first
        row for keys at least `reach` tokens before the query. H is the number of query heads, or 1: shared by all.
    Reference: Shaw et al. 2018, Self-Attention with Relative Position Representations, Eq. 3 and 4.
    """

    keys_HRK: torch.Tensor
    values_HRV: torch.Tensor | None = None

    @property
    def reach(self) -> int:
        """The distance from which on all are alike."""
        return self.keys_HRK.shape[1] // 2

    def of_heads(self, start: int, stop: int) -> "RelativePositions":
        """The rows of query heads [start, stop)."""
        values_HRV = self.values_HRV
        return RelativePositions(
            self.keys_HRK if len(self.keys_HRK) == 1 else self.keys_HRK[start:stop],
            values_HRV if values_HRV is None or len(values_HRV) == 1 else values_HRV[start:stop],
        )

    def check(self, heads: int, size: int, values: int) -> None:
        """Raises: ShapeError for rows that do not fit queries of so many heads and sizes."""
        for name, rows, width in (("keys", self.keys_HRK, size), ("values", self.values_HRV, values)):
            if rows is None:
                continue
            fits = rows.dim() == 3 and rows.shape[0] in (1, heads) and rows.shape[2] == width
            if not fits or not rows.shape[1] % 2 or rows.shape[1] != self.keys_HRK.shape[1]:
                raise ShapeError(
                    f"relative {name} of shape {tuple(rows.shape)} were given for {heads} heads; needed is "
                    f"[{heads} or 1, 2 reach + 1, {width}], with as many rows for keys as for values"
                )


class Tables(NamedTuple):
    """The rows of all heads, as the tiles take them; (None, None): no relative positions."""

    keys_HRK: torch.Tensor | None = None
    values_HRV: torch.Tensor | None = None

    @property
    def reach(self) -> int:
        """0 where there are none."""
        return 0 if self.keys_HRK is None else self.keys_HRK.shape[1] // 2

    def by_group(self, batch: int, groups: int, dtype: torch.dtype) -> "Tables":
        """[H, R, …] -> [B G, H / G, R, …]: beside the queries that read one head of keys."""
        return Tables(*(None if t is None else _by_group(t.to(dtype), batch, groups) for t in self))

    def of_heads(self, batch: int) -> "Tables":
        """The way back of `by_group`: a sum over the batch, [B G, H / G, R, …] -> [H, R, …]."""
        return Tables(*(None if t is None else t.flatten(0, 1).unflatten(0, (batch, -1)).sum(dim=0) for t in self))

    def like(self, other: "Tables") -> "Tables":
        """In the types of others."""
        return Tables(*(None if t is None or o is None else t.to(o.dtype) for t, o in zip(self, other, strict=True)))


def tables_of(relative: RelativePositions | None, heads: int, size: int, values: int) -> Tables:
    """The rows of each of the heads.

    Raises: ShapeError for rows that do not fit.
    """
    if relative is None:
        return Tables()
    relative.check(heads, size, values)
    return Tables(*(None if t is None else t.expand(heads, -1, -1) for t in (relative.keys_HRK, relative.values_HRV)))


def add_by_row(x_NRLS: torch.Tensor, by_row_NRLW: torch.Tensor, rows: torch.Tensor | int) -> torch.Tensor:
    """x + by_row[…, rows], in place; `rows` [L, S] is the row of each pair, or the one of all of them."""
    if isinstance(rows, int):
        return x_NRLS.add_(by_row_NRLW[..., rows, None])
    return x_NRLS.add_(by_row_NRLW.gather(-1, rows.to(x_NRLS.device).expand_as(x_NRLS)))


def sum_by_row(total_NRLW: torch.Tensor, x_NRLS: torch.Tensor, rows: torch.Tensor | int) -> None:
    """Add the elements of x to the totals of their rows: the transpose of `add_by_row`."""
    if isinstance(rows, int):
        total_NRLW[..., rows] += x_NRLS.sum(dim=-1)
    else:
        total_NRLW.scatter_add_(-1, rows.to(x_NRLS.device).expand_as(x_NRLS), x_NRLS)


def _by_group(rows_HRK: torch.Tensor, batch: int, groups: int) -> torch.Tensor:
    rows_GHRK = rows_HRK.unflatten(0, (groups, -1))
    expanded: torch.Tensor = rows_GHRK[None].expand(batch, *rows_GHRK.shape).flatten(0, 1)
    return expanded
