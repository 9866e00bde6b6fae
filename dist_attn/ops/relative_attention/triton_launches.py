"""Launches of relative attention's kernels, forward and backward."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from dist_attn.ops.denominator import Denominator
from dist_attn.ops.linear_attention.triton_forward import Plan, Stretch, chunk_sums, precision, scan, tile_dtype
from dist_attn.ops.linear_attention.triton_gradients import map_gradient_kernel, row_products_kernel
from dist_attn.ops.linear_attention.triton_tiles import Tiles
from dist_attn.ops.relative_attention.triton_gradients import (
    positions_gradient_kernel,
    relative_features_gradient_kernel,
    relative_values_gradient_kernel,
)
from dist_attn.ops.relative_attention.triton_outputs import positions_kernel, relative_outputs_kernel, row_sums_kernel

__all__ = ["Given", "Setting", "Walk", "relative_gradients", "relative_outputs", "walk"]

BLOCK_R = 32  # rows of phi_rp that enter a product at once
MAP_CHUNKS = 16  # chunks of tokens behind each partial sum of the gradient of phi_rp

_Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Setting:
    """What is the same for all launches of a call; `reach` is k."""

    causal: bool
    reach: int
    tiles: Tiles

    @property
    def blocks(self) -> int:
        """How many chunks a window reaches into on a side: all keys beyond are at least `reach` away."""
        return -(-max(0, self.reach - 1) // self.tiles.chunk)

    def chunks(self, tokens: int) -> int:
        return -(-tokens // self.tiles.chunk)

    def options(self, dtype: torch.dtype, *, depth: bool = True) -> dict[str, Any]:
        """What kernels over values of this type are compiled for; `depth` where they walk over features."""
        tiles = self.tiles
        found = {"CAUSAL": self.causal, "PRECISION": precision(dtype), "T": tiles.chunk, "BLOCK_V": tiles.block_v}
        found |= {"BLOCK_D": tiles.block_d} if depth else {}
        return {**found, "num_warps": tiles.warps, "num_stages": tiles.stages}


class Given(NamedTuple):
    """The inputs as kernels take them.

    Shapes: q [B, H, L, K], k [B, H, S, K], v [B, H, S, V], last dimension contiguous; rp [H, R, K], s [G, K, V],
        zm [G, K + 1], far [G, V + 1] and ones [G, NK T] float32.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    rp: torch.Tensor
    s: torch.Tensor
    zm: torch.Tensor
    far: torch.Tensor
    ones: torch.Tensor

    @staticmethod
    def of(setting: Setting, tensors: _Tensors) -> "Given":
        q, k, v, rp, s, z, far, ones = tensors
        filled = setting.chunks(v.shape[2]) * setting.tiles.chunk - v.shape[2]
        q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
        return Given(
            q,
            k,
            v,
            rp.float().contiguous(),
            s.flatten(0, 1).contiguous(),
            F.pad(z.flatten(0, 1), (0, 1)),
            far.flatten(0, 1).contiguous(),
            F.pad(ones.flatten(0, 1), (0, filled)),
        )

    @property
    def groups(self) -> int:
        return self.v.shape[0] * self.v.shape[1]

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Memory for G = B H groups, on the device of the tokens."""
        return torch.empty((self.groups, *shape), dtype=dtype, device=self.v.device)


class Walk(NamedTuple):
    """What outputs are made of.

    Shapes: position scores [G, L, R]; the state before each chunk (of all keys, N = 1, where attention is not causal)
        as it enters products [G, N, K, V] and [G, N, K + 1], and the one after the last [G, K, V] and [G, K + 1]; sums
        of values and keys before and from each chunk [G, NK + 1, V + 1].
    """

    positions: torch.Tensor
    before: torch.Tensor
    zm_before: torch.Tensor
    s_end: torch.Tensor
    zm_end: torch.Tensor
    earlier: torch.Tensor
    later: torch.Tensor


def walk(setting: Setting, given: Given) -> Walk:
    """Everything that outputs, and later gradients, are made of."""
    sums, zm = _chunk_sums(setting, given, given.k, given.v, (given.ones, given.ones))
    s_end, zm_end = sums.sum(1), zm.sum(1)
    before, zm_before = s_end.to(tile_dtype(given.v.dtype)), zm_end
    if setting.causal:
        gain = torch.ones(sums.shape[:2], device=sums.device)
        before, s_end, _ = scan(sums, given.s, gain, dtype=tile_dtype(given.v.dtype))
        zm_before, zm_end, _ = scan(zm, given.zm, gain, dtype=torch.float32)
    count = given.ones.view(given.groups, -1, setting.tiles.chunk).sum(-1, keepdim=True)
    of_chunks = torch.cat([_row_sums(setting, given, given.v, given.ones), count], dim=-1)
    earlier = _sums_before(of_chunks, given.far)
    later = earlier if setting.causal else _sums_from(of_chunks)
    return Walk(_positions(setting, given), before, zm_before, s_end, zm_end, earlier, later)


def relative_outputs(setting: Setting, given: Given, found: Walk) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [B, H, L, V] and denominators [G, L]."""
    q, k, v = given.q, given.k, given.v
    heads, tokens, size = q.shape[1:]
    keys, values = v.shape[2:]
    out = torch.empty((*q.shape[:3], values), dtype=v.dtype, device=v.device)
    den = given.empty(tokens)
    chunks = setting.chunks(tokens)
    relative_outputs_kernel[(chunks * given.groups, -(-values // setting.tiles.block_v))](
        q, k, v, found.positions, given.ones, found.before, found.zm_before, found.earlier, found.later, out, den,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3],
        tokens, keys, chunks, setting.chunks(keys), heads, size, values,
        found.positions.shape[2], setting.reach, setting.blocks, **setting.options(v.dtype),
    )  # fmt: skip
    return out, den


def relative_gradients(
    setting: Setting, given: Given, out: torch.Tensor, den: torch.Tensor, grads: _Tensors
) -> list[torch.Tensor]:
    """The gradients of all eight inputs from those of outputs, S and z; zeros for `ones`."""
    q, k, v = given.q, given.k, given.v
    heads, size, values = q.shape[1], q.shape[3], v.shape[3]
    grad_out = grads[0] if grads[0].stride(-1) == 1 else grads[0].contiguous()
    found = walk(setting, given)
    inverse, grad_den = _rows(setting, out, den, grad_out)

    # What queries send back through the states of the keys before them.
    sums, zm = _chunk_sums(setting, given, q, grad_out, (inverse, grad_den))
    after, zm_after = sums.sum(1).to(tile_dtype(v.dtype)), zm.sum(1)
    grad_s, grad_zm = torch.zeros_like(given.s), torch.zeros_like(given.zm)
    if setting.causal:
        gain = torch.ones(sums.shape[:2], device=sums.device)
        of_s = grads[1].flatten(0, 1).float().contiguous()
        of_zm = F.pad(grads[2].flatten(0, 1).float(), (0, 1))
        after, grad_s, _ = scan(sums, of_s, gain, dtype=tile_dtype(v.dtype), reverse=True)
        zm_after, grad_zm, _ = scan(zm, of_zm, gain, dtype=torch.float32, reverse=True)

    scores = _scores_gradient(setting, given, found, grad_out, inverse, grad_den)
    grad_q = _features_gradient(
        setting, given, (q, k, grad_out, v), (inverse, grad_den), found.before, found.zm_before, scores
    )
    grad_k = _features_gradient(setting, given, (k, q, v, grad_out), (inverse, grad_den), after, zm_after, None)
    grad_v, far = _values_gradient(setting, given, found, grad_out, inverse, after)
    grad_far = F.pad(far, (0, 1))  # the count of keys is no function of anything
    shape = (v.shape[0], heads)
    return [
        grad_q,
        grad_k,
        grad_v,
        _rows_gradient(setting, given, scores),
        grad_s.view(*shape, size, values),
        grad_zm[:, :-1].view(*shape, size),
        grad_far.view(*shape, values + 1),
        torch.zeros((*shape, v.shape[2]), device=v.device),
    ]


def _positions(setting: Setting, given: Given) -> torch.Tensor:
    heads, tokens, size = given.q.shape[1:]
    rows = given.rp.shape[1]
    found = given.empty(tokens, rows)
    chunks, block = setting.chunks(tokens), _block_r(rows)
    positions_kernel[(chunks * given.groups, -(-rows // block))](
        given.q, given.rp, found, *given.q.stride()[:3], tokens, chunks, heads, size, rows,
        PRECISION=precision(given.v.dtype), T=setting.tiles.chunk, BLOCK_R=block, BLOCK_D=setting.tiles.block_d,
        num_warps=4,
    )  # fmt: skip
    return found


def _chunk_sums(
    setting: Setting, given: Given, x: torch.Tensor, y: torch.Tensor, weights: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums of x y^T [G, N, K, V] and of x [G, N, K + 1] over each chunk, weighted."""
    size = x.shape[3]
    plan = Plan("none", False, Denominator(), setting.tiles, size, size)
    return chunk_sums(plan, Stretch(x, x, y, y, None, None, None), x, y, (*weights, weights[1]))


def _row_sums(setting: Setting, given: Given, y: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Weighted sums of y over each chunk, [G, N, V]."""
    heads, tokens, values = y.shape[1:]
    chunks, block = setting.chunks(tokens), setting.tiles.block_v
    found = given.empty(chunks, values)
    row_sums_kernel[(chunks * given.groups, -(-values // block))](
        y, weight, found, *y.stride()[:3], tokens, chunks, heads, values,
        T=setting.tiles.chunk, BLOCK_V=block, num_warps=4,
    )  # fmt: skip
    return found


def _sums_before(of_chunks: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """[G, N + 1, W]: `start` and the chunks before each; sums only grow, none is the difference of two."""
    return torch.cat([start[:, None], of_chunks], dim=1).cumsum(1)


def _sums_from(of_chunks: torch.Tensor) -> torch.Tensor:
    """[G, N + 1, W]: of each chunk and those after it."""
    return F.pad(of_chunks.flip(1).cumsum(1).flip(1), (0, 0, 0, 1))


def _rows(
    setting: Setting, out: torch.Tensor, den: torch.Tensor, grad_out: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of every query, [G, N T]: one over its denominator (0 without weight on any key), and that one's gradient."""
    heads, tokens, values = out.shape[1:]
    products = torch.empty_like(den)
    blocks = -(-tokens // 64)
    row_products_kernel[(products.shape[0] * blocks,)](
        grad_out, out, products, *grad_out.stride()[:3], *out.stride()[:3], tokens, blocks, heads, values,
        T=64, BLOCK_V=setting.tiles.block_v, num_warps=4,
    )  # fmt: skip
    inverse = torch.where(den == 0, 0.0, den.reciprocal())
    filled = (0, setting.chunks(tokens) * setting.tiles.chunk - tokens)
    return F.pad(inverse, filled), F.pad(-products * inverse, filled)


def _scores_gradient(
    setting: Setting, given: Given, found: Walk, grad_out: torch.Tensor, inverse: torch.Tensor, grad_den: torch.Tensor
) -> torch.Tensor:
    """Of position scores, [G, L, R]."""
    v = given.v
    heads, tokens, values = grad_out.shape[1:]
    grad = torch.empty_like(found.positions)
    chunks = setting.chunks(tokens)
    positions_gradient_kernel[(chunks * given.groups,)](
        v, grad_out, inverse, grad_den, given.ones, found.earlier, found.later, grad,
        *v.stride()[:3], *grad_out.stride()[:3], tokens, v.shape[2], chunks, setting.chunks(v.shape[2]), heads, values,
        grad.shape[2], setting.reach, setting.blocks, **setting.options(v.dtype, depth=False),
    )  # fmt: skip
    return grad


def _features_gradient(
    setting: Setting,
    given: Given,
    sides: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    rows: tuple[torch.Tensor, torch.Tensor],
    state: torch.Tensor,
    zm: torch.Tensor,
    scores: torch.Tensor | None,
) -> torch.Tensor:
    """dq from the gradient of scores and (q, k, dO, v); dk from (k, q, v, dO) without one."""
    own, other, own_y, other_y = sides
    heads, tokens, size = own.shape[1:]
    grad = torch.empty(own.shape, dtype=own.dtype, device=own.device)
    chunks, rp_rows = setting.chunks(tokens), given.rp.shape[1]
    relative_features_gradient_kernel[(chunks * given.groups,)](
        own, other, own_y, other_y, *rows, state, zm, rows[0] if scores is None else scores, given.rp, grad,
        *own.stride()[:3], *other.stride()[:3], *own_y.stride()[:3], *other_y.stride()[:3], *grad.stride()[:3],
        tokens, chunks, heads, size, own_y.shape[3], rp_rows,
        KEYS=scores is None, BLOCK_R=_block_r(rp_rows), **setting.options(given.v.dtype),
    )  # fmt: skip
    return grad


def _values_gradient(
    setting: Setting, given: Given, found: Walk, grad_out: torch.Tensor, inverse: torch.Tensor, after: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """dv, and the gradient [G, V] of the sum of values that every query is far from."""
    q, k, v = given.q, given.k, given.v
    heads, tokens, size = q.shape[1:]
    keys, values = v.shape[2:]
    grad = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    chunks, key_chunks = setting.chunks(tokens), setting.chunks(keys)

    def outermost(row: int) -> torch.Tensor:
        weight = F.pad(found.positions[:, :, row], (0, inverse.shape[1] - tokens)) * inverse
        return _row_sums(setting, given, grad_out, weight)

    later = _sums_from(outermost(0))
    earlier = later
    if not setting.causal:
        of_chunks = outermost(2 * setting.reach)
        earlier = _sums_before(of_chunks, torch.zeros_like(of_chunks[:, 0]))
    relative_values_gradient_kernel[(key_chunks * given.groups, -(-values // setting.tiles.block_v))](
        q, k, grad_out, found.positions, inverse, after, earlier, later, grad,
        *q.stride()[:3], *k.stride()[:3], *grad_out.stride()[:3], *grad.stride()[:3],
        tokens, keys, chunks, key_chunks, heads, size, values,
        found.positions.shape[2], setting.reach, setting.blocks, **setting.options(v.dtype),
    )  # fmt: skip
    return grad, later[:, 0]


def _rows_gradient(setting: Setting, given: Given, scores: torch.Tensor) -> torch.Tensor:
    """Of phi_rp's rows, [H, R, K]."""
    q = given.q
    batch, heads, tokens, size = q.shape
    rows = scores.shape[2]
    chunks, block_r, block_d = setting.chunks(tokens), _block_r(rows), setting.tiles.block_d
    splits = -(-chunks // MAP_CHUNKS)
    parts = given.empty(splits, rows, size)
    map_gradient_kernel[(given.groups * splits, -(-rows // block_r), -(-size // block_d))](
        scores, q, parts, *q.stride()[:3], tokens, chunks, heads, size, rows, splits,
        PRECISION=precision(given.v.dtype), T=setting.tiles.chunk, BLOCK_D=block_r, BLOCK_K=block_d, num_warps=4,
    )  # fmt: skip
    return parts.view(batch, heads, splits, rows, size).sum((0, 2))


def _block_r(rows: int) -> int:
    return min(BLOCK_R, max(16, 1 << (rows - 1).bit_length()))
