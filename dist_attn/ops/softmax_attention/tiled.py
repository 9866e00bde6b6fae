"""Softmax attention tile by tile with a running maximum: memory of one tile, any placement, and a part that can merge.

A partial result over some of the keys is a pair: the output normalised over these keys, and the logarithm of the
weight they carry (log-sum-exp of the scores). Pairs over disjoint keys merge exactly, in any order.

Reference: Milakov and Gimelshein, Online normalizer calculation for softmax; Dao et al., FlashAttention, Algorithm 1
and Appendix B.2 (the backward pass from the log-sum-exp).
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from dist_attn.ops.softmax_attention.placement import Placement, Tile, visible_tiles
from dist_attn.ops.softmax_attention.relative import RelativePositions, Tables, add_by_row, sum_by_row, tables_of
from dist_attn.ops.softmax_attention.shapes import check_softmax_shapes

__all__ = ["fold_in_place", "merge_partials", "softmax_attention_partial", "tile_gradients", "tile_outputs"]

TILE_QUERIES = 256
TILE_KEYS = 1024
# Scores of so many head groups are computed at once as fit into this many elements, which a cache of a few MB holds.
TILE_ELEMENTS = 1 << 19
NO_TABLES = Tables()


def softmax_attention_partial(
    q_BHLK: torch.Tensor,
    k_BGSK: torch.Tensor,
    v_BGSV: torch.Tensor,
    *,
    causal: bool,
    scale: float | None = None,
    placement: Placement | None = None,
    relative: RelativePositions | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over these keys, and how much weight they carry; a query that sees none has zeros and -inf.

    With `relative` positions keys and values depend on where they stand from the query.

    Shapes: q [B, H, L, K], k [B, G, S, K], v [B, G, S, V] -> out [B, H, L, V], lse [B, H, L], float32 or wider.
    Both have gradients (once differentiable). Cost: scores of one tile above inputs, outputs and their gradients.
    Raises: ShapeError when shapes do not fit together.
    """
    check_softmax_shapes(q_BHLK, k_BGSK, v_BGSV)
    queries, keys = q_BHLK.shape[2], k_BGSK.shape[2]
    placement = Placement.in_order(queries, keys) if placement is None else placement
    placement.check(queries, keys)
    scale = q_BHLK.shape[3] ** -0.5 if scale is None else scale
    tables = tables_of(relative, q_BHLK.shape[1], q_BHLK.shape[3], v_BGSV.shape[3])
    out: tuple[torch.Tensor, torch.Tensor] = _Partial.apply(  # type: ignore[no-untyped-call]
        q_BHLK, k_BGSK, v_BGSV, *tables, placement, causal, scale
    )
    return out


def merge_partials(outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The partial result over the keys of all the given ones, merged from the first to the last.

    Shapes: out [..., L, V] and lse [..., L] each -> the same.
    """
    # Not torch.logsumexp: where no part sees anything its gradient is NaN.
    peak = _finite(torch.stack([lse.detach() for lse in lses]).amax(dim=0))
    weights = [torch.exp(lse - peak) for lse in lses]
    mass, total = torch.zeros_like(peak), torch.zeros_like(outs[0])
    for out, weight in zip(outs, weights, strict=True):
        mass, total = mass + weight, total + weight[..., None] * out
    seen = mass > 0
    mass = torch.where(seen, mass, 1.0)
    return total / mass[..., None], torch.where(seen, peak + mass.log(), -torch.inf)


def fold_in_place(out: torch.Tensor, lse: torch.Tensor, more_out: torch.Tensor, more_lse: torch.Tensor) -> torch.Tensor:
    """`merge_partials` of two, without gradients: `out` becomes the merged one, `more_out` is used up; the new lse."""
    peak = _finite(torch.maximum(lse, more_lse))
    weight, more_weight = torch.exp(lse - peak), torch.exp(more_lse - peak)
    mass = weight + more_weight
    seen = mass > 0
    mass = torch.where(seen, mass, 1.0)
    out.mul_((weight / mass)[..., None]).add_(more_out.mul_((more_weight / mass)[..., None]))
    return torch.where(seen, peak + mass.log(), -torch.inf)


def tile_outputs(
    q_BHLK: torch.Tensor,
    k_BGSK: torch.Tensor,
    v_BGSV: torch.Tensor,
    placement: Placement,
    causal: bool,
    scale: float,
    tables: Tables = NO_TABLES,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`softmax_attention_partial` without a gradient."""
    wide = torch.promote_types(q_BHLK.dtype, torch.float32)
    out_BHLV = q_BHLK.new_zeros((*q_BHLK.shape[:3], v_BGSV.shape[3]), dtype=wide)
    lse_BHL = torch.full(q_BHLK.shape[:3], -torch.inf, dtype=wide, device=q_BHLK.device)
    q_NRLK, (k_NSK, v_NSV) = _rows(q_BHLK, k_BGSK), (k_BGSK.flatten(0, 1), v_BGSV.flatten(0, 1))
    out_NRLV, lse_NRL = _rows(out_BHLV, k_BGSK), _rows(lse_BHL, k_BGSK)
    near = tables.by_group(k_BGSK.shape[0], k_BGSK.shape[1], wide)
    with torch.autocast(q_BHLK.device.type, enabled=False):
        for heads in _head_chunks(q_NRLK, k_NSK):
            k, v = k_NSK[heads], v_NSV[heads]
            for rows, tiles in visible_tiles(placement, causal=causal, tile_queries=TILE_QUERIES, tile_keys=TILE_KEYS):
                q = q_NRLK[heads, :, rows].to(wide)
                peak = torch.full(q.shape[:3], -torch.inf, dtype=wide, device=q.device)
                mass, numerator = torch.zeros_like(peak), out_NRLV[heads, :, rows]
                q_near = _by_row(q, near.keys_HRK, heads, scale)
                by_row = _no_rows(q, near.values_HRV)
                for tile in tiles:
                    scores = _scores(q, k[:, tile.keys].to(wide), tile, scale)
                    at = 0 if q_near is None else placement.relative_rows(tables.reach, rows, tile.keys)
                    if q_near is not None:
                        add_by_row(scores, q_near, at)
                    higher = torch.maximum(peak, scores.amax(dim=-1))
                    fade = torch.exp(peak - _finite(higher))
                    weights = scores.sub_(_finite(higher)[..., None]).exp_()
                    mass = mass * fade + weights.sum(dim=-1)
                    numerator.mul_(fade[..., None]).add_(_weighted(weights, v[:, tile.keys].to(wide)))
                    if by_row is not None:
                        sum_by_row(by_row.mul_(fade[..., None]), weights, at)
                    peak = higher
                if by_row is not None and near.values_HRV is not None:
                    numerator.add_(by_row @ near.values_HRV[heads])
                numerator.div_(torch.where(mass > 0, mass, 1.0)[..., None])
                lse_NRL[heads, :, rows] = _finite(peak) + mass.log()
    return out_BHLV, lse_BHL


def tile_gradients(
    q_BHLK: torch.Tensor,
    k_BGSK: torch.Tensor,
    v_BGSV: torch.Tensor,
    lse_BHL: torch.Tensor,
    d_out_BHLV: torch.Tensor,
    drop_BHL: torch.Tensor,
    placement: Placement,
    causal: bool,
    scale: float,
    tables: Tables = NO_TABLES,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Tables]:
    """Gradients of q, k, v and tables where weights are exp(score - lse) and d score = weight (d_out . v - drop).

    With the lse over all keys of the sequence this is the share of the keys given here: shares of q add up.
    """
    wide = lse_BHL.dtype
    dq, dk, dv = (torch.zeros(t.shape, dtype=wide, device=t.device) for t in (q_BHLK, k_BGSK, v_BGSV))
    q_NRLK, (k_NSK, v_NSV) = _rows(q_BHLK, k_BGSK), (k_BGSK.flatten(0, 1), v_BGSV.flatten(0, 1))
    lse_NRL, drop_NRL, d_out_NRLV = (_rows(t, k_BGSK) for t in (lse_BHL, drop_BHL, d_out_BHLV))
    dq_NRLK, (dk_NSK, dv_NSV) = _rows(dq, k_BGSK), (dk.flatten(0, 1), dv.flatten(0, 1))
    near = tables.by_group(k_BGSK.shape[0], k_BGSK.shape[1], wide)
    d_near = Tables(*(None if t is None else torch.zeros_like(t) for t in near))
    with torch.autocast(q_BHLK.device.type, enabled=False):
        for heads in _head_chunks(q_NRLK, k_NSK):
            for rows, tiles in visible_tiles(placement, causal=causal, tile_queries=TILE_QUERIES, tile_keys=TILE_KEYS):
                q, d_out = q_NRLK[heads, :, rows].to(wide), d_out_NRLV[heads, :, rows].to(wide)
                lse, drop = _finite(lse_NRL[heads, :, rows, None]), drop_NRL[heads, :, rows, None]
                q_near, v_near = _by_row(q, near.keys_HRK, heads, scale), _by_row(d_out, near.values_HRV, heads, 1.0)
                d_scores_by_row, weights_by_row = _no_rows(q, near.keys_HRK), _no_rows(q, near.values_HRV)
                for tile in tiles:
                    k, v = k_NSK[heads, tile.keys].to(wide), v_NSV[heads, tile.keys].to(wide)
                    scores = _scores(q, k, tile, scale)
                    at = 0 if q_near is None else placement.relative_rows(tables.reach, rows, tile.keys)
                    if q_near is not None:
                        add_by_row(scores, q_near, at)
                    weights = scores.sub_(lse).exp_()
                    dv_NSV[heads, tile.keys] += weights.flatten(1, 2).mT @ d_out.flatten(1, 2)
                    d_weights = _weighted(d_out, v.mT)
                    if v_near is not None and weights_by_row is not None:
                        add_by_row(d_weights, v_near, at)
                        sum_by_row(weights_by_row, weights, at)
                    d_scores = d_weights.sub_(drop).mul_(weights).mul_(scale)
                    if d_scores_by_row is not None:
                        sum_by_row(d_scores_by_row, d_scores, at)
                    dq_NRLK[heads, :, rows] += _weighted(d_scores, k)
                    dk_NSK[heads, tile.keys] += d_scores.flatten(1, 2).mT @ q.flatten(1, 2)
                if d_scores_by_row is not None and near.keys_HRK is not None and d_near.keys_HRK is not None:
                    dq_NRLK[heads, :, rows] += d_scores_by_row @ near.keys_HRK[heads]
                    d_near.keys_HRK[heads] += d_scores_by_row.mT @ q
                if weights_by_row is not None and d_near.values_HRV is not None:
                    d_near.values_HRV[heads] += weights_by_row.mT @ d_out
    return dq, dk, dv, d_near.of_heads(q_BHLK.shape[0])


class _Partial(Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        near_keys: torch.Tensor | None,
        near_values: torch.Tensor | None,
        placement: Placement,
        causal: bool,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = tile_outputs(q, k, v, placement, causal, scale, Tables(near_keys, near_values))
        ctx.save_for_backward(q, k, v, near_keys, near_values, out, lse)
        ctx.settings = (placement, causal, scale)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: torch.Tensor, d_lse: torch.Tensor) -> Any:
        q, k, v, *near, out, lse = ctx.saved_tensors
        tables = Tables(*near)
        # A query that sees nothing has a constant lse, and no tile reads what stands here for it.
        drop = (d_out * out).sum(dim=-1) - d_lse
        placement, causal, scale = ctx.settings
        *of_tokens, of_tables = tile_gradients(q, k, v, lse, d_out, drop, placement, causal, scale, tables)
        gradients = [d.to(t.dtype) for d, t in zip(of_tokens, (q, k, v), strict=True)]
        return *gradients, *of_tables.like(tables), None, None, None


def _rows(x_BHL: torch.Tensor, k_BGSK: torch.Tensor) -> torch.Tensor:
    """[B, H, L, …] -> [B G, H / G, L, …]: the queries that read one head of keys stand together."""
    batch, groups = k_BGSK.shape[:2]
    return x_BHL.reshape(batch * groups, x_BHL.shape[1] // groups, *x_BHL.shape[2:])


def _head_chunks(q_NRLK: torch.Tensor, k_NSK: torch.Tensor) -> list[slice]:
    number, repeats, queries = q_NRLK.shape[:3]
    tile = repeats * min(queries, TILE_QUERIES) * min(k_NSK.shape[1], TILE_KEYS)
    chunk = max(1, TILE_ELEMENTS // max(1, tile))
    return [slice(start, start + chunk) for start in range(0, number, chunk)]


def _scores(q_NRLK: torch.Tensor, k_NSK: torch.Tensor, tile: Tile, scale: float) -> torch.Tensor:
    scores_NRLS = _weighted(q_NRLK, k_NSK.mT).mul_(scale)
    if tile.hidden_LS is not None:
        scores_NRLS.masked_fill_(tile.hidden_LS.to(scores_NRLS.device), -torch.inf)
    return scores_NRLS


def _by_row(x_NRLK: torch.Tensor, rows_NRWK: torch.Tensor | None, heads: slice, scale: float) -> torch.Tensor | None:
    """x times each row of a table, times `scale`: [N, R, L, K] and [N, R, W, K] -> [N, R, L, W]."""
    return None if rows_NRWK is None else (x_NRLK @ rows_NRWK[heads].mT).mul_(scale)


def _no_rows(x_NRLK: torch.Tensor, rows_NRWK: torch.Tensor | None) -> torch.Tensor | None:
    """A zero for each row of a table and each query, [N, R, L, W]."""
    return None if rows_NRWK is None else x_NRLK.new_zeros((*x_NRLK.shape[:3], rows_NRWK.shape[2]))


def _weighted(x_NRLK: torch.Tensor, y_NKS: torch.Tensor) -> torch.Tensor:
    """x y for each of the R query heads, as one product: [N, R, L, K], [N, K, S] -> [N, R, L, S]."""
    return cast(torch.Tensor, (x_NRLK.flatten(1, 2) @ y_NKS).unflatten(1, x_NRLK.shape[1:3]))


def _finite(lse: torch.Tensor) -> torch.Tensor:
    """0 in place of -inf, so that exp(-inf - it) is 0 and not NaN."""
    return lse.masked_fill(lse == -torch.inf, 0.0)
