"""Softmax attention tile by tile with a running maximum: memory of one tile, any placement, and a part that can merge.

A partial result over some of the keys is a pair: the output normalised over these keys, and the logarithm of the
weight they carry (log-sum-exp of the scores). Pairs over disjoint keys merge exactly, in any order.

Shape letters: B batch, H query heads, G key heads, L queries, S keys, K head size, V values; N = B G heads of keys in a
row, R = H / G query heads that read each of them, W rows of a table of relative positions.

Reference: Milakov and Gimelshein, Online normalizer calculation for softmax; Dao et al., FlashAttention, Algorithm 1
and Appendix B.2 (the backward pass from the log-sum-exp).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from dist_attn.ops.device import without_autocast
from dist_attn.ops.onednn import onednn_linear, takes_onednn_linear
from dist_attn.ops.softmax_attention.call import QueryPlacement, SoftmaxCall

TILE_QUERIES = 256
TILE_KEYS = 1024
# Scores of so many head groups are computed at once as fit into this many elements, which a cache of a few MB holds.
TILE_ELEMENTS = 1 << 19
SIZE_STEP = 64  # products by oneDNN are of multiples of it, since oneDNN keeps code for every size


class TileTerms(NamedTuple):
    """The terms of a call beside its tensors."""

    causal: bool
    scale: float
    placement: QueryPlacement
    window: int | None = None
    softcap: float | None = None

    @staticmethod
    def of(call: SoftmaxCall) -> "TileTerms":
        """The terms of a call; without a placement its tokens are in order."""
        placement = QueryPlacement.in_order(call.queries, call.keys) if call.placement is None else call.placement
        return TileTerms(call.causal, call.score_scale, placement, call.options.window, call.options.softcap)


class TileTensors(NamedTuple):
    """The tensors of a call, or the gradients of them; the rows of relative positions are those of each head."""

    q_BHLK: torch.Tensor
    k_BGSK: torch.Tensor
    v_BGSV: torch.Tensor
    near_keys_HWK: torch.Tensor | None = None
    near_values_HWV: torch.Tensor | None = None

    @staticmethod
    def of(call: SoftmaxCall) -> "TileTensors":
        """The tensors of a call that is checked."""
        tables: tuple[torch.Tensor | None, ...] = (None, None)
        if call.options.relative is not None:
            heads = call.q_BHLK.shape[1]
            tables = call.options.relative.keys_HRK, call.options.relative.values_HRV
            tables = tuple(None if t is None else t.expand(heads, -1, -1) for t in tables)
        return TileTensors(*call.qkv, *tables)

    @property
    def reach(self) -> int:
        """Of relative positions; 0 where there are none."""
        return 0 if self.near_keys_HWK is None else self.near_keys_HWK.shape[1] // 2

    def by_key_head(self, dtype: torch.dtype) -> "TileTensors":
        """Queries [N, R, L, K] beside the head of keys [N, S, K] that they read, tables [N, R, W, …] in `dtype`."""
        batch, groups = self.k_BGSK.shape[:2]
        q, tables = _rows(self.q_BHLK, self.k_BGSK), (self.near_keys_HWK, self.near_values_HWV)
        grouped = (None if t is None else t.to(dtype).unflatten(0, (groups, -1)) for t in tables)
        near = (None if t is None else t.expand(batch, *t.shape).flatten(0, 1) for t in grouped)
        return TileTensors(q, self.k_BGSK.flatten(0, 1), self.v_BGSV.flatten(0, 1), *near)

    def zeros(self, dtype: torch.dtype) -> "TileTensors":
        """Zeros in the shapes of these tensors, for sums of gradients."""
        return _tensors(None if t is None else torch.zeros(t.shape, dtype=dtype, device=t.device) for t in self)

    def like(self, other: "TileTensors") -> "TileTensors":
        """In the types of others."""
        pairs = zip(self, other, strict=True)
        return _tensors(None if t is None or o is None else t.to(o.dtype) for t, o in pairs)

    def without_keys(self) -> "TileTensors":
        """Queries and tables alone: what stays where it is while keys travel."""
        return self._replace(k_BGSK=self.k_BGSK[:, :, :0], v_BGSV=self.v_BGSV[:, :, :0])


def _tensors(tensors: Iterable[torch.Tensor | None]) -> TileTensors:
    return TileTensors(*tensors)  # type: ignore[arg-type]  # queries, keys and values are always there


class Partial(NamedTuple):
    """A partial result: outputs [B, H, L, V] over some keys and the logarithm of their weight [B, H, L]."""

    out: torch.Tensor
    lse: torch.Tensor


def attend_partially(call: SoftmaxCall) -> Partial:
    """Attention over these keys, and how much weight they carry; a query that sees none has zeros and -inf.

    The call is one that was checked; its sinks do not count (`with_sinks`).

    Shapes: q [B, H, L, K], k [B, G, S, K], v [B, G, S, V] -> out [B, H, L, V], lse [B, H, L], float32 or wider.
    Both have gradients (once differentiable). Cost: scores of one tile above inputs, outputs and their gradients.
    """
    return Partial(*_Partial.apply(TileTerms.of(call), *TileTensors.of(call)))  # type: ignore[no-untyped-call]


def with_sinks(part: Partial, sinks_H: torch.Tensor | None) -> torch.Tensor:
    """The outputs of a partial result over all keys, where the denominator holds a sink too.

    A sink is a key of weight exp(sink) whose value is 0, so it takes its share of the outputs away.
    """
    if sinks_H is None:
        return part.out
    return part.out * torch.sigmoid(part.lse - sinks_H.to(part.lse.dtype)[:, None])[..., None]


def merge_partials(outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor]) -> Partial:
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
    return Partial(total / mass[..., None], torch.where(seen, peak + mass.log(), -torch.inf))


def fold_in_place(part: Partial, more: Partial) -> Partial:
    """`merge_partials` of two, without gradients: it is written over the outputs of both."""
    peak = _finite(torch.maximum(part.lse, more.lse))
    weight, more_weight = torch.exp(part.lse - peak), torch.exp(more.lse - peak)
    mass = weight + more_weight
    seen = mass > 0
    mass = torch.where(seen, mass, 1.0)
    part.out.mul_((weight / mass)[..., None]).add_(more.out.mul_((more_weight / mass)[..., None]))
    return Partial(part.out, torch.where(seen, peak + mass.log(), -torch.inf))


def tile_outputs(terms: TileTerms, x: TileTensors) -> Partial:
    """`attend_partially` without a gradient."""
    q_BHLK = x.q_BHLK
    wide = torch.promote_types(q_BHLK.dtype, torch.float32)
    out_BHLV = q_BHLK.new_zeros((*q_BHLK.shape[:3], x.v_BGSV.shape[3]), dtype=wide)
    lse_BHL = torch.full(q_BHLK.shape[:3], -torch.inf, dtype=wide, device=q_BHLK.device)
    out_NRLV, lse_NRL = _rows(out_BHLV, x.k_BGSK), _rows(lse_BHL, x.k_BGSK)
    q_NRLK, k_NSK, v_NSV, near_keys, near_values = x.by_key_head(wide)
    with without_autocast(q_BHLK.device):
        for heads in _head_chunks(q_NRLK, k_NSK):
            k, v = k_NSK[heads], v_NSV[heads]
            for rows, tiles in visible_tiles(terms, x):
                q = q_NRLK[heads, :, rows].to(wide)
                peak = torch.full(q.shape[:3], -torch.inf, dtype=wide, device=q.device)
                mass, numerator = torch.zeros_like(peak), out_NRLV[heads, :, rows]
                q_near, by_row = _by_row(q, near_keys, heads, terms.scale), _no_rows(q, near_values)
                for tile in tiles:
                    scores = _scores(q, k[:, tile.keys].to(wide), q_near, tile, terms)
                    higher = torch.maximum(peak, scores.amax(dim=-1))
                    fade = torch.exp(peak - _finite(higher))
                    weights = scores.sub_(_finite(higher)[..., None]).exp_()
                    mass = mass * fade + weights.sum(dim=-1)
                    numerator.mul_(fade[..., None]).add_(_weighted(weights, v[:, tile.keys].to(wide)))
                    if by_row is not None:
                        _sum_by_row(by_row.mul_(fade[..., None]), weights, tile.near)
                    peak = higher
                if by_row is not None and near_values is not None:
                    numerator.add_(by_row @ near_values[heads])
                numerator.div_(torch.where(mass > 0, mass, 1.0)[..., None])
                lse_NRL[heads, :, rows] = _finite(peak) + mass.log()
    return Partial(out_BHLV, lse_BHL)


def tile_gradients(
    terms: TileTerms, x: TileTensors, lse_BHL: torch.Tensor, d_out_BHLV: torch.Tensor, drop_BHL: torch.Tensor
) -> TileTensors:
    """Gradients where weights are exp(score - lse) and d score = weight (d_out . v - drop).

    With the lse over all keys of the sequence this is the share of the keys given here: shares of q add up.
    """
    wide = lse_BHL.dtype
    grads, (q_NRLK, k_NSK, v_NSV, near_keys, near_values) = x.zeros(wide), x.by_key_head(wide)
    dq, dk, dv, *_ = grads.by_key_head(wide)
    d_near_keys, d_near_values = (None if t is None else torch.zeros_like(t) for t in (near_keys, near_values))
    lse_NRL, drop_NRL, d_out_NRLV = (_rows(t, x.k_BGSK) for t in (lse_BHL, drop_BHL, d_out_BHLV))
    with without_autocast(x.q_BHLK.device):
        for heads in _head_chunks(q_NRLK, k_NSK):
            for rows, tiles in visible_tiles(terms, x):
                q, d_out = q_NRLK[heads, :, rows].to(wide), d_out_NRLV[heads, :, rows].to(wide)
                lse, drop = _finite(lse_NRL[heads, :, rows, None]), drop_NRL[heads, :, rows, None]
                q_near, v_near = _by_row(q, near_keys, heads, terms.scale), _by_row(d_out, near_values, heads, 1.0)
                d_scores_by_row, weights_by_row = _no_rows(q, near_keys), _no_rows(q, near_values)
                for tile in tiles:
                    k, v = k_NSK[heads, tile.keys].to(wide), v_NSV[heads, tile.keys].to(wide)
                    scores = _scores(q, k, q_near, tile, terms)
                    slope = _slope(scores, terms.softcap)
                    weights = scores.sub_(lse).exp_()
                    dv[heads, tile.keys] += weights.flatten(1, 2).mT @ d_out.flatten(1, 2)
                    d_weights = _weighted(d_out, v.mT)
                    _add_by_row(d_weights, v_near, tile.near)
                    _sum_by_row(weights_by_row, weights, tile.near)
                    d_scores = d_weights.sub_(drop).mul_(weights).mul_(terms.scale)
                    if slope is not None:
                        d_scores.mul_(slope)
                    _sum_by_row(d_scores_by_row, d_scores, tile.near)
                    dq[heads, :, rows] += _weighted(d_scores, k)
                    dk[heads, tile.keys] += d_scores.flatten(1, 2).mT @ q.flatten(1, 2)
                if d_scores_by_row is not None and near_keys is not None and d_near_keys is not None:
                    dq[heads, :, rows] += d_scores_by_row @ near_keys[heads]
                    d_near_keys[heads] += d_scores_by_row.mT @ q
                if weights_by_row is not None and d_near_values is not None:
                    d_near_values[heads] += weights_by_row.mT @ d_out
    return grads._replace(
        near_keys_HWK=_over_batch(d_near_keys, x.q_BHLK.shape[0]),
        near_values_HWV=_over_batch(d_near_values, x.q_BHLK.shape[0]),
    )


class _Partial(Function):
    @staticmethod
    def forward(ctx: Any, terms: TileTerms, *tensors: Any) -> Any:
        part = tile_outputs(terms, TileTensors(*tensors))
        ctx.save_for_backward(*tensors, *part)
        ctx.terms = terms
        return tuple(part)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: torch.Tensor, d_lse: torch.Tensor) -> Any:
        *tensors, out, lse = ctx.saved_tensors
        x = TileTensors(*tensors)
        # A query that sees nothing has a constant lse, and no tile reads what stands here for it.
        drop = (d_out * out).sum(dim=-1) - d_lse
        return (None, *tile_gradients(ctx.terms, x, lse, d_out, drop).like(x))


@dataclass(frozen=True)
class Tile:
    """Keys that some query of a tile sees; `hidden_LS` is None where every query sees all of them.

    `near` [L, S] is the row of each pair in a table of relative positions, or the one row of all of them.
    """

    keys: slice
    hidden_LS: torch.Tensor | None
    near: torch.Tensor | int


@dataclass(frozen=True)
class _Span:
    """Some tokens in a row and between which positions, and which documents, they lie."""

    part: slice
    first: int
    last: int
    first_document: int
    last_document: int


def visible_tiles(terms: TileTerms, x: TileTensors) -> Iterator[tuple[slice, Iterator[Tile]]]:
    """For every tile of queries the tiles of keys that it sees something of; masks are made one at a time.

    The host decides by the positions that it has, and the masks are made where the tensors of the call are.
    """
    placement = terms.placement
    columns = _spans(placement.keys_S, placement.key_documents_S, TILE_KEYS)
    there = terms._replace(placement=placement.on(x.q_BHLK.device))
    for row in _spans(placement.queries_L, placement.query_documents_L, TILE_QUERIES):
        yield row.part, _seen_from(row, columns, there, x.reach)


def _seen_from(row: _Span, columns: list[_Span], terms: TileTerms, reach: int) -> Iterator[Tile]:
    causal, placement, window = terms.causal, terms.placement, terms.window
    for column in columns:
        apart = column.last_document < row.first_document or row.last_document < column.first_document
        passed = window is not None and column.last <= row.first - window
        if apart or passed or (causal and column.first > row.last):
            continue
        all_in_window = window is None or column.first > row.last - window
        one_document = row.first_document == row.last_document == column.first_document == column.last_document
        if one_document and all_in_window and not (causal and column.last > row.first):
            hidden_LS = None
        else:
            hidden_LS = placement.hidden(causal=causal, window=window, rows=row.part, columns=column.part)
        near: torch.Tensor | int
        if column.last - row.first <= -reach:
            near = 0
        elif column.first - row.last >= reach:
            near = 2 * reach
        else:
            near = placement.relative_rows(reach, row.part, column.part) if reach else 0
        yield Tile(column.part, hidden_LS, near)


def _spans(positions: torch.Tensor, documents: torch.Tensor | None, size: int) -> list[_Span]:
    spans = []
    for start in range(0, len(positions), size):
        part = slice(start, min(start + size, len(positions)))
        first, last = (int(edge) for edge in positions[part].aminmax())
        of_document = (0, 0) if documents is None else tuple(int(edge) for edge in documents[part].aminmax())
        spans.append(_Span(part, first, last, of_document[0], of_document[1]))
    return spans


def _rows(x_BHL: torch.Tensor, k_BGSK: torch.Tensor) -> torch.Tensor:
    """[B, H, L, …] -> [B G, H / G, L, …]: the queries that read one head of keys stand together."""
    batch, groups = k_BGSK.shape[:2]
    return x_BHL.reshape(batch * groups, x_BHL.shape[1] // groups, *x_BHL.shape[2:])


def _head_chunks(q_NRLK: torch.Tensor, k_NSK: torch.Tensor) -> list[slice]:
    number, repeats, queries = q_NRLK.shape[:3]
    tile = repeats * min(queries, TILE_QUERIES) * min(k_NSK.shape[1], TILE_KEYS)
    chunk = max(1, TILE_ELEMENTS // max(1, tile))
    return [slice(start, start + chunk) for start in range(0, number, chunk)]


def _scores(
    q_NRLK: torch.Tensor, k_NSK: torch.Tensor, q_near_NRLW: torch.Tensor | None, tile: Tile, terms: TileTerms
) -> torch.Tensor:
    """The scores of a tile, -inf where a query does not see a key; `q_near_NRLW` are those of relative positions."""
    scores_NRLS = _weighted(q_NRLK, k_NSK.mT).mul_(terms.scale)
    _add_by_row(scores_NRLS, q_near_NRLW, tile.near)
    if terms.softcap is not None:
        scores_NRLS.div_(terms.softcap).tanh_().mul_(terms.softcap)
    if tile.hidden_LS is not None:
        scores_NRLS.masked_fill_(tile.hidden_LS, -torch.inf)
    return scores_NRLS


def _slope(scores_NRLS: torch.Tensor, softcap: float | None) -> torch.Tensor | None:
    """The derivative of the soft cap where it gave these scores; 0 for -inf, None where there is no cap."""
    return None if softcap is None else 1 - scores_NRLS.div(softcap).clamp_(min=-1.0).square_()


def _by_row(x_NRLK: torch.Tensor, rows_NRWK: torch.Tensor | None, heads: slice, scale: float) -> torch.Tensor | None:
    """x times each row of a table, times `scale`: [N, R, L, K] and [N, R, W, K] -> [N, R, L, W]."""
    return None if rows_NRWK is None else (x_NRLK @ rows_NRWK[heads].mT).mul_(scale)


def _no_rows(x_NRLK: torch.Tensor, rows_NRWK: torch.Tensor | None) -> torch.Tensor | None:
    """A zero for each row of a table and each query, [N, R, L, W]."""
    return None if rows_NRWK is None else x_NRLK.new_zeros((*x_NRLK.shape[:3], rows_NRWK.shape[2]))


def _add_by_row(x_NRLS: torch.Tensor, by_row_NRLW: torch.Tensor | None, rows: torch.Tensor | int) -> None:
    """x += by_row[…, rows], if there is a table; `rows` [L, S] is the row of each pair, or the one of all of them."""
    if by_row_NRLW is None:
        return
    if isinstance(rows, int):
        x_NRLS.add_(by_row_NRLW[..., rows, None])
    else:
        x_NRLS.add_(by_row_NRLW.gather(-1, rows.expand_as(x_NRLS)))


def _sum_by_row(total_NRLW: torch.Tensor | None, x_NRLS: torch.Tensor, rows: torch.Tensor | int) -> None:
    """Add the elements of x to the totals of their rows: the transpose of `_add_by_row`."""
    if total_NRLW is None:
        return
    if isinstance(rows, int):
        total_NRLW[..., rows] += x_NRLS.sum(dim=-1)
    else:
        total_NRLW.add_(sum_by_row(x_NRLS, rows, total_NRLW.shape[-1]))


def _over_batch(rows_NRWK: torch.Tensor | None, batch: int) -> torch.Tensor | None:
    """The gradient of a table [H, W, K] from its copies beside every head of keys, [B G, H / G, W, K]."""
    return None if rows_NRWK is None else rows_NRWK.flatten(0, 1).unflatten(0, (batch, -1)).sum(dim=0)


def _weighted(x_NRLK: torch.Tensor, y_NKS: torch.Tensor) -> torch.Tensor:
    """x y for each of the R query heads, as one product: [N, R, L, K], [N, K, S] -> [N, R, L, S]."""
    x_NPK, (number, inputs, outputs) = x_NRLK.flatten(1, 2), y_NKS.shape
    # Tiles that are large enough for oneDNN are of one head of keys.
    one_head = number == 1 and inputs % SIZE_STEP == outputs % SIZE_STEP == 0
    if one_head and takes_onednn_linear(x_NPK[0], y_NKS[0].mT):
        y_NPS = onednn_linear(x_NPK[0], y_NKS[0].mT)[None]
    else:
        y_NPS = x_NPK @ y_NKS
    return cast(torch.Tensor, y_NPS.unflatten(1, x_NRLK.shape[1:3]))


def _finite(lse: torch.Tensor) -> torch.Tensor:
    """0 in place of -inf, so that exp(-inf - it) is 0 and not NaN."""
    return lse.masked_fill(lse == -torch.inf, 0.0)


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
