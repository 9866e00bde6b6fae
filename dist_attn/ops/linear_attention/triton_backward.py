"""Launches of the backward kernels on one stretch of tokens: adjoint sums and their scan, then all gradients.

Shape letters: B batch, H heads, L tokens, K head size, V values, D projections, M features; G = B H, N chunks of T
tokens.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from dist_attn.ops.kernel_operation import present
from dist_attn.ops.linear_attention.differentiable import LinearInputs, LinearTensors
from dist_attn.ops.linear_attention.triton_divisors import divisor_rows_kernel
from dist_attn.ops.linear_attention.triton_forward import (
    CLOSED_GATE,
    Attended,
    Gates,
    Scanned,
    StateSums,
    Stretch,
    TokenWeights,
    blocks,
    either,
    gates,
    key_states,
    precision,
    states,
    strides,
    tile_dtype,
)
from dist_attn.ops.linear_attention.triton_gradients import (
    features_gradient_kernel,
    inputs_gradient_kernel,
    map_gradient_kernel,
    values_gradient_kernel,
)
from dist_attn.ops.linear_attention.triton_states import gate_gradients_kernel
from dist_attn.ops.linear_attention.triton_tiles import power_tile

MAP_CHUNKS = 16  # chunks of tokens behind each partial sum of dw


class DivisorRows(NamedTuple):
    """Of every query, [G, N T]: one over its divisor, and the gradients of its denominator and mass.

    Where they are made they are one tensor, [3, G, N T].
    """

    inverse: torch.Tensor
    grad_den: torch.Tensor
    grad_mass: torch.Tensor


class Side(NamedTuple):
    """The inputs of the gradient of queries' or keys' features, and where it goes; see `features_gradient_kernel`."""

    own: torch.Tensor
    other: torch.Tensor
    own_y: torch.Tensor
    other_y: torch.Tensor
    weights: TokenWeights
    state: StateSums
    grad: torch.Tensor
    keys: bool


class FeaturesGradient(NamedTuple):
    """dw [H, D, K] where it was asked for, sums of E [G, N T] and their part that went through states."""

    w: torch.Tensor | None
    rows: torch.Tensor
    state_rows: torch.Tensor


def stretch_gradients(
    stretch: Stretch,
    start: StateSums,
    rows_3GT: torch.Tensor,
    grad_out: torch.Tensor,
    grad_end: StateSums,
    into: Sequence[torch.Tensor],
    *,
    with_map: bool,
) -> LinearTensors:
    """The gradients of a stretch from those of its outputs and of the state after it, [G, M, V] and [G, M + 1].

    `start` is the state before it, of which those of chunks are made again.
    Those of q, k and v fill `into`, those of the state before are of the same shapes; None where no such input is.
    """
    q, k, v, rows = stretch.q, stretch.k, stretch.v, DivisorRows(*rows_3GT)
    gate = gates(stretch)
    before = key_states(stretch, gate, start).before
    of_queries = TokenWeights(*(gate.read * rows_3GT))
    other = None if stretch.log_gate is None else before
    after = states(stretch, q, grad_out, of_queries, grad_end, gate.gain, q.dtype, reverse=True, other=other)
    grad_q, grad_k, grad_v = into
    queries = Side(q, k, grad_out, v, of_queries, before, grad_q, False)
    keys = Side(k, q, v, grad_out, TokenWeights.all(gate.left), after.before, grad_k, True)
    of_q, of_k = (features_gradient(stretch, gate, rows, side, with_map) for side in (queries, keys))
    key_scale = None if stretch.key_scale is None else of_k.rows[:, : stretch.tokens].reshape(v.shape[:3])
    return LinearInputs(
        q=grad_q,
        k=grad_k,
        v=_values_gradient(stretch, gate, rows, grad_out, after.before, grad_v),
        log_gate=_gate_gradient(stretch, gate, of_q, of_k, after),
        key_scale=key_scale,
        s=after.end.s,
        zm=after.end.zm,
        w=None if of_q.w is None or of_k.w is None else of_q.w + of_k.w,
    )


def undivided_rows(stretch: Stretch, grad_den: torch.Tensor, grad_mass: torch.Tensor) -> torch.Tensor:
    """`DivisorRows` of outputs that were not divided, from the gradients of their denominators and masses [B, H, L]."""
    return stretch.filled(torch.stack([torch.ones_like(grad_den), grad_den, grad_mass]))


def policy_rows(stretch: Stretch, attended: Attended, grad_out: torch.Tensor) -> torch.Tensor:
    """`DivisorRows` of outputs that were divided, from dO [B, H, L, V]."""
    plan, tokens = stretch.plan, stretch.chunks * stretch.plan.tiles.chunk
    rows = torch.empty((3, stretch.groups, tokens), device=grad_out.device)
    divisor_rows_kernel[(stretch.groups * stretch.chunks,)](
        grad_out, attended.out, attended.den, attended.mass, rows, *strides(grad_out, *attended), stretch.tokens,
        stretch.chunks, grad_out.shape[1], grad_out.shape[3], plan.policy.eps, KIND=plan.policy.kind,
        T=plan.tiles.chunk, BLOCK_V=plan.tiles.block_v, num_warps=4,
    )  # fmt: skip
    return rows


def features_gradient(
    stretch: Stretch, gate: Gates, rows: DivisorRows, side: Side, with_map: bool, *, pairs: bool = True
) -> FeaturesGradient:
    """The gradient of one side; without `pairs` all that a token sees went through one state."""
    own, size, values = side.own, side.own.shape[3], side.own_y.shape[3]
    has_w = stretch.plan.map in ("gaussian", "arc_cosine")
    plan = replace(stretch.plan, tiles=stretch.plan.tiles.of_features_gradient(values, projects=has_w))
    projected = grad = side.grad
    if has_w:
        projected = grad.new_empty((*own.shape[:3], plan.projections), dtype=tile_dtype(own.dtype))
    sums, state_sums = torch.empty_like(gate.left), torch.empty_like(gate.left)
    features_gradient_kernel[(stretch.chunks * stretch.groups,)](
        own, side.other, side.own_y, side.other_y, stretch.w, gate.decay, either(gate.key_scale, sums),
        either(stretch.documents, sums), *rows, *side.weights, *side.state, projected, sums, state_sums,
        *strides(own, side.other, side.own_y, side.other_y, projected), *stretch.sizes(size, values),
        KEYS=side.keys, PAIRS=pairs, WITH_ROWS=stretch.log_gate is not None or stretch.key_scale is not None,
        **stretch.options, **plan.constants(own.dtype),
    )  # fmt: skip
    if not has_w:
        return FeaturesGradient(None, sums, state_sums)
    tiles, heads = plan.tiles, own.shape[1]
    inputs_gradient_kernel[(stretch.chunks * stretch.groups,)](
        projected, own, stretch.w, grad, *strides(own, grad), stretch.tokens, stretch.chunks, heads, size,
        plan.projections, UNIT=plan.unit_norm, PRECISION=precision(own.dtype), T=tiles.chunk, BLOCK_D=tiles.block_d,
        BLOCK_X=power_tile(size), num_warps=tiles.warps, num_stages=stretch.plan.tiles.stages,
    )  # fmt: skip
    grad_w = map_gradient(projected.flatten(0, 1), own, plan.tiles.chunk, own.dtype) if with_map else None
    return FeaturesGradient(grad_w, sums, state_sums)


def map_gradient(projected: torch.Tensor, x: torch.Tensor, chunk: int, dtype: torch.dtype) -> torch.Tensor:
    """The gradient [H, D, K] of w in w x, from that of the projections, [G, L, D], and x [B, H, L, K]."""
    batch, heads, tokens, size = x.shape
    projections, chunks = projected.shape[2], blocks(tokens, chunk)
    splits, block_d, block_k = blocks(chunks, MAP_CHUNKS), *(min(64, power_tile(n)) for n in (projections, size))
    parts = torch.empty((batch * heads, splits, projections, size), device=x.device)
    map_gradient_kernel[(batch * heads * splits, blocks(projections, block_d), blocks(size, block_k))](
        projected, x, parts, *strides(x), tokens, chunks, heads, size, projections, splits,
        PRECISION=precision(dtype), T=chunk, BLOCK_D=block_d, BLOCK_K=block_k, num_warps=4,
    )  # fmt: skip
    return parts.view(batch, heads, splits, projections, size).sum((0, 2))


def _values_gradient(
    stretch: Stretch, gate: Gates, rows: DivisorRows, grad_out: torch.Tensor, after: StateSums, grad: torch.Tensor
) -> torch.Tensor:
    q, k, v = stretch.q, stretch.k, stretch.v
    values_gradient_kernel[(stretch.chunks * stretch.groups, blocks(v.shape[3], stretch.plan.tiles.block_v))](
        q, k, grad_out, stretch.w, gate.decay, either(gate.key_scale, grad), gate.left, rows.inverse,
        either(stretch.documents, grad), *after, grad, *strides(q, k, grad_out, grad),
        *stretch.sizes(q.shape[3], v.shape[3]), **stretch.options, **stretch.plan.constants(q.dtype),
    )  # fmt: skip
    return grad


def _gate_gradient(
    stretch: Stretch, gate: Gates, of_q: FeaturesGradient, of_k: FeaturesGradient, after: Scanned
) -> torch.Tensor | None:
    """[B, H, L], from rows [G, N T] and what came through the gates of whole chunks [G, N]; None without gates."""
    if stretch.log_gate is None:
        return None
    key_rows, state_rows = of_k.rows, of_k.state_rows
    if gate.key_scale is not None:
        key_rows, state_rows = key_rows * gate.key_scale, state_rows * gate.key_scale
    groups, chunks = gate.gain.shape
    grad_decay = (of_q.rows - key_rows).view(groups, chunks, -1)
    # The last cumulative gate of a chunk is in the weight of all that enters the state after it.
    of_states = state_rows.view(groups, chunks, -1).sum(-1)
    grad_decay[..., -1].add_(of_states.addcmul_(gate.gain, present(after.products)))
    grad = torch.empty(stretch.log_gate.shape, dtype=torch.float32, device=stretch.log_gate.device)
    gate_gradients_kernel[(groups * chunks,)](
        stretch.log_gate, either(stretch.documents, grad), grad_decay, grad, stretch.tokens, chunks,
        HAS_DOCUMENTS=stretch.documents is not None, CLOSED=CLOSED_GATE, T=stretch.plan.tiles.chunk, num_warps=8,
    )  # fmt: skip
    return grad
