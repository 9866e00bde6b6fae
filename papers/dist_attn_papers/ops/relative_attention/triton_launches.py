"""Launches of relative attention's kernels, forward and backward.

Shape letters: B batch, H heads, G = B H, L queries in N chunks, S keys in NK chunks, T tokens of a chunk, K features,
V values, W = V + 1 (values and their count), R rows of relative positions.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from dist_attn.ops.denominator import Denominator
from dist_attn.ops.linear_attention.triton_backward import map_gradient
from dist_attn.ops.linear_attention.triton_forward import (
    KernelPlan,
    Scanned,
    StateSums,
    Stretch,
    TokenWeights,
    blocks,
    precision,
    rowwise,
    sequence_sums,
    states,
    strides,
    tile_dtype,
)
from dist_attn.ops.linear_attention.triton_tiles import Tiles
from dist_attn_papers.ops.relative_attention.triton_gradients import (
    positions_gradient_kernel,
    relative_features_gradient_kernel,
    relative_values_gradient_kernel,
    row_products_kernel,
)
from dist_attn_papers.ops.relative_attention.triton_outputs import (
    positions_kernel,
    relative_outputs_kernel,
    row_sums_kernel,
)

BLOCK_R = 32  # rows of phi_rp that enter a product at once


def window_tiles(tiles: Tiles) -> Tiles:
    """The tiles of a call that holds position scores besides: what a thread has of these, more warps halve."""
    return replace(tiles, block_v=min(64, tiles.block_v), warps=tiles.chunk // 8)


@dataclass(frozen=True)
class Setting:
    """The settings that all launches of a call share; `reach` is k."""

    causal: bool
    reach: int
    tiles: Tiles

    @property
    def blocks(self) -> int:
        """The number of chunks that a window reaches into on a side: all keys beyond are at least `reach` away."""
        return self.chunks(max(0, self.reach - 1))

    def chunks(self, tokens: int) -> int:
        """The number of chunks that hold so many tokens."""
        return blocks(tokens, self.tiles.chunk)

    def options(self, dtype: torch.dtype) -> dict[str, Any]:
        """The constants that kernels over values of this type are compiled for."""
        tiles = self.tiles
        return {
            "CAUSAL": self.causal,
            "PRECISION": precision(dtype),
            "T": tiles.chunk,
            "BLOCK_V": tiles.block_v,
            "num_warps": tiles.warps,
            "num_stages": tiles.stages,
        }


class RelativeTensors(NamedTuple):
    """The tensors of a call, or their gradients: S and z are those before the first key, far is a sum of values."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    rp: torch.Tensor
    s: torch.Tensor
    z: torch.Tensor
    far: torch.Tensor
    ones: torch.Tensor

    def like(self, tensors: "RelativeTensors", needs: "RelativeTensors") -> "RelativeTensors":
        """Gradients in the types of their tensors, None where they are not needed."""
        triples = zip(self, tensors, needs, strict=True)
        return RelativeTensors(*(grad.to(x.dtype) if need else None for grad, x, need in triples))  # type: ignore[arg-type]


class KernelInputs(NamedTuple):
    """The inputs as kernels take them.

    Shapes: q [B, H, L, K], k [B, H, S, K], v [B, H, S, V], last dimension contiguous; rp [H, R, K], state [G, K, V] and
        [G, K + 1], far [G, V + 1] and ones [G, NK T] float32.
    """

    setting: Setting
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    rp: torch.Tensor
    state: StateSums
    far: torch.Tensor
    ones: torch.Tensor

    @staticmethod
    def of(setting: Setting, x: RelativeTensors) -> "KernelInputs":
        """Lay these tensors out as the kernels take them."""
        keys = x.v.shape[2]
        return KernelInputs(
            setting,
            q=rowwise(x.q),
            k=rowwise(x.k),
            v=rowwise(x.v),
            rp=x.rp.float().contiguous(),
            state=StateSums(x.s.flatten(0, 1).contiguous(), F.pad(x.z.flatten(0, 1), (0, 1))),
            far=x.far.flatten(0, 1).contiguous(),
            ones=F.pad(x.ones.flatten(0, 1), (0, setting.chunks(keys) * setting.tiles.chunk - keys)),
        )

    @property
    def groups(self) -> int:
        """G."""
        return self.v.shape[0] * self.v.shape[1]

    @property
    def chunks(self) -> int:
        """N."""
        return self.setting.chunks(self.q.shape[2])

    @property
    def key_chunks(self) -> int:
        """NK."""
        return self.setting.chunks(self.v.shape[2])

    def empty(self, *shape: int) -> torch.Tensor:
        """Memory for every group, on the device of the tokens."""
        return torch.empty((self.groups, *shape), device=self.v.device)

    @property
    def window_sizes(self) -> tuple[int, ...]:
        """R, k and the blocks of a window, as kernels take them."""
        return self.rp.shape[1], self.setting.reach, self.setting.blocks


class Walk(NamedTuple):
    """The tensors that outputs are made of.

    Shapes: position scores [G, L, R]; the state before each chunk (of all keys, N = 1, where attention is not causal)
        as it enters products [G, N, K, V] and [G, N, K + 1], and the one after the last [G, K, V] and [G, K + 1]; sums
        of values and keys before and from each chunk [G, NK + 1, W].
    """

    positions: torch.Tensor
    before: StateSums
    end: StateSums
    earlier: torch.Tensor
    later: torch.Tensor


class QueryRows(NamedTuple):
    """The rows of queries, [G, N T]: one over the denominator (0 without weight on any key), and its gradient."""

    inverse: torch.Tensor
    grad_den: torch.Tensor


class _Side(NamedTuple):
    """The inputs of the gradient of queries' or keys' features; see `relative_features_gradient_kernel`."""

    own: torch.Tensor
    other: torch.Tensor
    own_y: torch.Tensor
    other_y: torch.Tensor
    state: StateSums
    scores: torch.Tensor | None  # the gradient of position scores, of queries alone


def walk(x: KernelInputs) -> Walk:
    """Compute everything that outputs, and later gradients, are made of."""
    scanned = _states(x, x.k, x.v, TokenWeights.all(x.ones), x.state)
    count = x.ones.view(x.groups, -1, x.setting.tiles.chunk).sum(-1, keepdim=True)
    of_chunks = torch.cat([_row_sums(x, x.v, x.ones), count], dim=-1)
    earlier = _sums_before(of_chunks, x.far)
    later = earlier if x.setting.causal else _sums_from(of_chunks)
    return Walk(_positions(x), scanned.before, scanned.end, earlier, later)


def relative_outputs(x: KernelInputs, walked: Walk, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [B, H, L, V] of this type and denominators [B, H, L]."""
    q, k, v, tiles = x.q, x.k, x.v, x.setting.tiles
    heads, tokens, size = q.shape[1:]
    keys, values = v.shape[2:]
    out = torch.empty((*q.shape[:3], values), dtype=dtype, device=v.device)
    den = torch.empty(q.shape[:3], device=v.device)
    relative_outputs_kernel[(x.chunks * x.groups, blocks(values, tiles.block_v))](
        q, k, v, walked.positions, x.ones, *walked.before, walked.earlier, walked.later, out, den,
        *strides(q, k, v, out), tokens, keys, x.chunks, x.key_chunks, heads, size, values, *x.window_sizes,
        BLOCK_D=tiles.block_d, **x.setting.options(v.dtype),
    )  # fmt: skip
    return out, den


def relative_gradients(
    x: KernelInputs,
    out: torch.Tensor,
    den: torch.Tensor,
    grad_out: torch.Tensor,
    grad_s: torch.Tensor,
    grad_z: torch.Tensor,
) -> RelativeTensors:
    """The gradients of all inputs from those of outputs, S and z; zeros for `ones`."""
    q, k, v, (batch, heads, keys, values) = x.q, x.k, x.v, x.v.shape
    grad_out, walked = rowwise(grad_out), walk(x)
    rows = _query_rows(x.setting, out, den, grad_out)
    # The gradients that queries send back through the states of the keys before them.
    grad_end = StateSums(grad_s.flatten(0, 1).float().contiguous(), F.pad(grad_z.flatten(0, 1).float(), (0, 1)))
    weights = TokenWeights(rows.inverse, rows.grad_den, rows.grad_den)
    after = _states(x, q, grad_out, weights, grad_end, reverse=True)
    start = after.end if x.setting.causal else StateSums(*map(torch.zeros_like, x.state))
    scores = _scores_gradient(x, walked, grad_out, rows)
    grad_v, far = _values_gradient(x, walked, grad_out, rows, after.before)
    return RelativeTensors(
        q=_features_gradient(x, rows, _Side(q, k, grad_out, v, walked.before, scores)),
        k=_features_gradient(x, rows, _Side(k, q, v, grad_out, after.before, None)),
        v=grad_v,
        rp=map_gradient(scores, q, x.setting.tiles.chunk, v.dtype),
        s=start.s.unflatten(0, (batch, heads)),
        z=start.zm[:, :-1].unflatten(0, (batch, heads)),
        far=F.pad(far, (0, 1)).view(batch, heads, values + 1),  # the count of keys is no function of anything
        ones=torch.zeros((batch, heads, keys), device=v.device),
    )


def _states(
    x: KernelInputs,
    tokens: torch.Tensor,
    y: torch.Tensor,
    weights: TokenWeights,
    start: StateSums,
    *,
    reverse: bool = False,
) -> Scanned:
    """The states before all chunks of these tokens, and the one after the last; of all of them if not causal."""
    size = tokens.shape[3]
    plan = KernelPlan("none", False, Denominator(), x.setting.tiles, size, size, size)
    stretch = Stretch(plan, tokens, tokens, y, y)
    if x.setting.causal:
        gain = stretch.empty(stretch.chunks).fill_(1.0)
        return states(stretch, tokens, y, weights, start, gain, y.dtype, reverse=reverse)
    end = sequence_sums(stretch, tokens, y, weights, y.dtype)
    return Scanned(end._replace(s=end.s.to(tile_dtype(x.v.dtype))), end, None)


def _positions(x: KernelInputs) -> torch.Tensor:
    """Position scores [G, L, R]."""
    heads, tokens, size = x.q.shape[1:]
    rows = x.rp.shape[1]
    positions, block = x.empty(tokens, rows), _block_r(rows)
    positions_kernel[(x.chunks * x.groups, blocks(rows, block))](
        x.q, x.rp, positions, *strides(x.q), tokens, x.chunks, heads, size, rows,
        PRECISION=precision(x.v.dtype), T=x.setting.tiles.chunk, BLOCK_R=block, BLOCK_D=x.setting.tiles.block_d,
        num_warps=4,
    )  # fmt: skip
    return positions


def _row_sums(x: KernelInputs, y: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Weighted sums of y over each chunk, [G, N, V]."""
    heads, tokens, values = y.shape[1:]
    chunks, block = x.setting.chunks(tokens), x.setting.tiles.block_v
    sums = x.empty(chunks, values)
    row_sums_kernel[(chunks * x.groups, blocks(values, block))](
        y, weight, sums, *strides(y), tokens, chunks, heads, values,
        T=x.setting.tiles.chunk, BLOCK_V=block, num_warps=4,
    )  # fmt: skip
    return sums


def _sums_before(of_chunks: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """[G, N + 1, W]: `start` and the chunks before each; sums only grow, none is the difference of two."""
    return torch.cat([start[:, None], of_chunks], dim=1).cumsum(1)


def _sums_from(of_chunks: torch.Tensor) -> torch.Tensor:
    """[G, N + 1, W]: of each chunk and those after it."""
    return F.pad(of_chunks.flip(1).cumsum(1).flip(1), (0, 0, 0, 1))


def _row_products(a: torch.Tensor, b: torch.Tensor, tiles: Tiles) -> torch.Tensor:
    """a_t . b_t of [B, H, L, V] tensors, float32 [B, H, L]."""
    heads, tokens, values = a.shape[1:]
    products = torch.empty(a.shape[:3], device=a.device)
    count = blocks(tokens, 64)
    row_products_kernel[(a.shape[0] * heads * count,)](
        a, b, products, *strides(a, b), tokens, count, heads, values, T=64, BLOCK_V=tiles.block_v, num_warps=4,
    )  # fmt: skip
    return products


def _query_rows(setting: Setting, out: torch.Tensor, den: torch.Tensor, grad_out: torch.Tensor) -> QueryRows:
    products = _row_products(grad_out, out, setting.tiles)
    inverse = torch.where(den == 0, 0.0, den.reciprocal())
    behind = (0, setting.chunks(out.shape[2]) * setting.tiles.chunk - out.shape[2])
    return QueryRows(*(F.pad(row.flatten(0, 1), behind) for row in (inverse, -products * inverse)))


def _scores_gradient(x: KernelInputs, walked: Walk, grad_out: torch.Tensor, rows: QueryRows) -> torch.Tensor:
    """The gradient of position scores, [G, L, R]."""
    v, (heads, tokens, values) = x.v, grad_out.shape[1:]
    grad = torch.empty_like(walked.positions)
    positions_gradient_kernel[(x.chunks * x.groups,)](
        v, grad_out, *rows, x.ones, walked.earlier, walked.later, grad, *strides(v, grad_out),
        tokens, v.shape[2], x.chunks, x.key_chunks, heads, values, *x.window_sizes, **x.setting.options(v.dtype),
    )  # fmt: skip
    return grad


def _features_gradient(x: KernelInputs, rows: QueryRows, side: _Side) -> torch.Tensor:
    """dq, or dk without the gradient of scores."""
    own, other, own_y, other_y, state, scores = side
    heads, tokens, size = own.shape[1:]
    grad = torch.empty(own.shape, dtype=own.dtype, device=own.device)
    chunks, rp_rows = x.setting.chunks(tokens), x.rp.shape[1]
    relative_features_gradient_kernel[(chunks * x.groups,)](
        own, other, own_y, other_y, *rows, *state, rows.inverse if scores is None else scores, x.rp, grad,
        *strides(own, other, own_y, other_y, grad), tokens, chunks, heads, size, own_y.shape[3], rp_rows,
        KEYS=scores is None, BLOCK_R=_block_r(rp_rows), BLOCK_D=x.setting.tiles.block_d,
        **x.setting.options(x.v.dtype),
    )  # fmt: skip
    return grad


def _values_gradient(
    x: KernelInputs, walked: Walk, grad_out: torch.Tensor, rows: QueryRows, after: StateSums
) -> tuple[torch.Tensor, torch.Tensor]:
    """dv, and the gradient [G, V] of the sum of values that every query is far from."""
    q, k, v, tiles = x.q, x.k, x.v, x.setting.tiles
    heads, tokens, size = q.shape[1:]
    keys, values = v.shape[2:]
    grad = torch.empty(v.shape, dtype=v.dtype, device=v.device)

    def outermost(row: int) -> torch.Tensor:
        weight = F.pad(walked.positions[:, :, row], (0, rows.inverse.shape[1] - tokens)) * rows.inverse
        return _row_sums(x, grad_out, weight)

    later = _sums_from(outermost(0))
    earlier = later
    if not x.setting.causal:
        of_chunks = outermost(2 * x.setting.reach)
        earlier = _sums_before(of_chunks, torch.zeros_like(of_chunks[:, 0]))
    relative_values_gradient_kernel[(x.key_chunks * x.groups, blocks(values, tiles.block_v))](
        q, k, grad_out, walked.positions, rows.inverse, after.s, earlier, later, grad, *strides(q, k, grad_out, grad),
        tokens, keys, x.chunks, x.key_chunks, heads, size, values, *x.window_sizes,
        BLOCK_D=tiles.block_d, **x.setting.options(v.dtype),
    )  # fmt: skip
    return grad, later[:, 0]


def _block_r(rows: int) -> int:
    """Rows of phi_rp that enter a product at once, of so many."""
    return min(BLOCK_R, max(16, 1 << (rows - 1).bit_length()))
