"""Launches of the backward kernels on one stretch of tokens: adjoint sums and their scan, then all gradients."""

from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F

from dist_attn.ops.linear_attention.differentiable import Inputs, Tensors
from dist_attn.ops.linear_attention.triton_forward import (
    CLOSED_GATE,
    Gates,
    Plan,
    States,
    Stretch,
    chunk_sums,
    either,
    options,
    precision,
    scan,
    tile_dtype,
)
from dist_attn.ops.linear_attention.triton_gradients import (
    features_gradient_kernel,
    map_gradient_kernel,
    row_products_kernel,
    values_gradient_kernel,
)
from dist_attn.ops.linear_attention.triton_states import gate_gradients_kernel

MAP_CHUNKS = 16  # chunks of tokens behind each partial sum of dw


class Rows(NamedTuple):
    """Of every query, [G, N T]: one over its divisor, and the gradients of its denominator and mass."""

    inverse: torch.Tensor
    grad_den: torch.Tensor
    grad_mass: torch.Tensor


class Side(NamedTuple):
    """What the gradient of queries' or keys' features is made of; see `features_gradient_kernel`."""

    own: torch.Tensor
    other: torch.Tensor
    own_y: torch.Tensor
    other_y: torch.Tensor
    weights: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    state: torch.Tensor
    zm: torch.Tensor
    keys: bool


def stretch_gradients(
    plan: Plan,
    stretch: Stretch,
    gate: Gates,
    state: States,
    rows: Rows,
    grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    *,
    with_map: bool,
) -> Tensors:
    """The gradients of a stretch from `grads`: dO [B, H, L, V], dS [G, M, V] and dzm [G, M + 1].

    Those of the state before are [G, M, V] and [G, M + 1]; None where there is no such input.
    """
    grad_out, grad_s, grad_zm = grads
    of_queries = tuple(gate.read * row for row in rows)
    sums, zm_sums = chunk_sums(plan, stretch, stretch.q, grad_out, (of_queries[0], of_queries[1], of_queries[2]))
    gated = stretch.log_gate is not None
    after, s_start, s_dots = scan(
        sums, grad_s, gate.gain, dtype=tile_dtype(stretch.v.dtype), reverse=True, other=state.before if gated else None
    )
    zm_after, zm_start, zm_dots = scan(
        zm_sums, grad_zm, gate.gain, dtype=torch.float32, reverse=True, other=state.zm_before if gated else None
    )
    q, k, v = stretch.q, stretch.k, stretch.v
    of_keys = (gate.left, gate.left, gate.left)
    queries = Side(
        q, k, grad_out, v, (of_queries[0], of_queries[1], of_queries[2]), state.before, state.zm_before, False
    )
    keys = Side(k, q, v, grad_out, of_keys, after, zm_after, True)
    grad_q, w_of_q, query_rows, _ = features_gradient(plan, stretch, gate, rows, queries, with_map)
    grad_k, w_of_k, key_rows, state_rows = features_gradient(plan, stretch, gate, rows, keys, with_map)
    grad_gate = grad_scale = None
    if s_dots is not None and zm_dots is not None:
        ends = gate.gain * (s_dots + zm_dots)
        grad_gate = _gate_gradient(plan, stretch, gate, query_rows, key_rows, state_rows, ends)
    if stretch.key_scale is not None:
        grad_scale = key_rows[:, : v.shape[2]].reshape(v.shape[:3])
    return Inputs(
        q=grad_q,
        k=grad_k,
        v=_values_gradient(plan, stretch, gate, rows, grad_out, after, zm_after),
        log_gate=grad_gate,
        key_scale=grad_scale,
        s=s_start,
        zm=zm_start,
        w=None if w_of_q is None or w_of_k is None else w_of_q + w_of_k,
    )


def given_rows(plan: Plan, stretch: Stretch, grad_den: torch.Tensor, grad_mass: torch.Tensor) -> Rows:
    """Rows of outputs that were not divided, from the gradients of their denominators and masses [B, H, L]."""
    filled = stretch.chunks(plan) * plan.tiles.chunk - stretch.v.shape[2]
    ones = torch.ones_like(grad_den)
    return Rows(*(F.pad(row.flatten(0, 1).float(), (0, filled)) for row in (ones, grad_den, grad_mass)))


def policy_rows(
    plan: Plan, stretch: Stretch, results: tuple[torch.Tensor, torch.Tensor, torch.Tensor], grad_out: torch.Tensor
) -> Rows:
    """Rows of outputs [B, H, L, V] that were divided, from denominators and masses [B, H, L] and dO [B, H, L, V]."""
    out, den, mass = results
    heads, tokens, values = out.shape[1:]
    products = torch.empty_like(den, memory_format=torch.contiguous_format)
    blocks = plan.blocks(tokens, 64)
    row_products_kernel[(products.shape[0] * heads * blocks,)](
        grad_out, out, products, *grad_out.stride()[:3], *out.stride()[:3], tokens, blocks, heads, values,
        T=64, BLOCK_V=plan.tiles.block_v, num_warps=4,
    )  # fmt: skip
    with torch.enable_grad():
        # The policy in its one place, with its own derivatives.
        den, mass = den.detach().requires_grad_(), mass.detach().requires_grad_()
        divisor = plan.policy.guard(den, mass)
    inverse = divisor.detach().reciprocal()
    grad_den = grad_mass = None
    if divisor.requires_grad:
        grad_den, grad_mass = torch.autograd.grad(divisor, (den, mass), -products * inverse, allow_unused=True)
    filled = stretch.chunks(plan) * plan.tiles.chunk - tokens
    grads = (inverse if row is None else row for row in (inverse, grad_den, grad_mass))
    found = [F.pad(row.flatten(0, 1), (0, filled)) for row in grads]
    nothing = torch.zeros_like(found[0])
    return Rows(found[0], nothing if grad_den is None else found[1], nothing if grad_mass is None else found[2])


def features_gradient(
    plan: Plan, stretch: Stretch, gate: Gates, rows: Rows, side: Side, with_map: bool, *, pairs: bool = True
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """dx, dw [H, D, K], sums of E [G, N T] and their part that went through states.

    Without `pairs` all that a token sees went through one state.
    """
    heads, tokens, size = side.own.shape[1:]
    values, chunks = side.own_y.shape[3], stretch.chunks(plan)
    grad = torch.empty(side.own.shape, dtype=side.own.dtype, device=side.own.device)
    projected = grad
    if with_map:
        projected = stretch.empty(tokens, plan.projections, dtype=tile_dtype(side.own.dtype))
    sums, state_sums = torch.empty_like(gate.left), torch.empty_like(gate.left)
    features_gradient_kernel[(chunks * sums.shape[0],)](
        side.own, side.other, side.own_y, side.other_y, stretch.w, gate.decay, either(gate.key_scale, sums),
        either(stretch.documents, sums), *rows, *side.weights, side.state, side.zm, grad, projected, sums, state_sums,
        *side.own.stride()[:3], *side.other.stride()[:3], *side.own_y.stride()[:3], *side.other_y.stride()[:3],
        *grad.stride()[:3], tokens, chunks, heads, size, plan.projections, plan.features, values, plan.scale,
        KEYS=side.keys, PAIRS=pairs, WITH_ROWS=stretch.log_gate is not None or stretch.key_scale is not None,
        WITH_PROJECTED=with_map, BLOCK_X=plan.tiles.fitted_inputs(size),
        **options(stretch), **replace(plan, tiles=plan.tiles.of_features_gradient()).constants(side.own.dtype),
    )  # fmt: skip
    return grad, _map_gradient(plan, stretch, projected, side.own) if with_map else None, sums, state_sums


def _map_gradient(plan: Plan, stretch: Stretch, projected: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    batch, heads, tokens, size = x.shape
    chunks = stretch.chunks(plan)
    splits = plan.blocks(chunks, MAP_CHUNKS)
    parts = stretch.empty(splits, plan.projections, size)
    grid = (
        parts.shape[0] * splits,
        plan.blocks(plan.projections, plan.tiles.block_d),
        plan.blocks(size, plan.tiles.block_k),
    )
    map_gradient_kernel[grid](
        projected, x, parts, *x.stride()[:3], tokens, chunks, heads, size, plan.projections, splits,
        PRECISION=precision(x.dtype), T=plan.tiles.chunk, BLOCK_D=plan.tiles.block_d, BLOCK_K=plan.tiles.block_k,
        num_warps=4,
    )  # fmt: skip
    return parts.view(batch, heads, splits, plan.projections, size).sum((0, 2))


def _values_gradient(
    plan: Plan,
    stretch: Stretch,
    gate: Gates,
    rows: Rows,
    grad_out: torch.Tensor,
    after: torch.Tensor,
    zm_after: torch.Tensor,
) -> torch.Tensor:
    q, k, v = stretch.q, stretch.k, stretch.v
    heads, tokens, values = v.shape[1:]
    chunks = stretch.chunks(plan)
    grad = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    values_gradient_kernel[(chunks * v.shape[0] * heads, plan.blocks(values, plan.tiles.block_v))](
        q, k, grad_out, stretch.w, gate.decay, either(gate.key_scale, grad), gate.left, rows.inverse,
        either(stretch.documents, grad), after, zm_after, grad,
        *q.stride()[:3], *k.stride()[:3], *grad_out.stride()[:3], *grad.stride()[:3],
        tokens, chunks, heads, q.shape[3], plan.projections, plan.features, values, plan.scale,
        **options(stretch), **plan.constants(q.dtype),
    )  # fmt: skip
    return grad


def _gate_gradient(
    plan: Plan,
    stretch: Stretch,
    gate: Gates,
    query_rows: torch.Tensor,
    key_rows: torch.Tensor,
    state_rows: torch.Tensor,
    ends: torch.Tensor,
) -> torch.Tensor:
    """[B, H, L], from rows [G, N T] and what came through the gates of whole chunks [G, N]."""
    assert stretch.log_gate is not None  # only called with gates
    if gate.key_scale is not None:
        key_rows, state_rows = key_rows * gate.key_scale, state_rows * gate.key_scale
    groups, chunks = ends.shape
    grad_decay = (query_rows - key_rows).view(groups, chunks, -1)
    # The last cumulative gate of a chunk is in the weight of all that enters the state after it.
    grad_decay[..., -1] += ends + state_rows.view(groups, chunks, -1).sum(-1)
    grad = torch.empty(stretch.log_gate.shape, dtype=torch.float32, device=stretch.log_gate.device)
    gate_gradients_kernel[(groups * chunks,)](
        stretch.log_gate, either(stretch.documents, grad), grad_decay, grad, stretch.log_gate.shape[2], chunks,
        HAS_DOCUMENTS=stretch.documents is not None, CLOSED=CLOSED_GATE, T=plan.tiles.chunk, num_warps=8,
    )  # fmt: skip
    return grad
