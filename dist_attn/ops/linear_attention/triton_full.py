"""Attention that is not causal by GPU kernels: the sums that all keys leave behind, and queries that read one state.

Neither makes features of the whole sequence, nor a state for each chunk. Gates are weights of keys here: what is left
of each after the last one, times its scale. Sums and read-outs are functions of their own, because a pass that is cut
across ranks exchanges states between them.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from dist_attn.ops.denominator import Denominator
from dist_attn.ops.feature_map import FeatureMap
from dist_attn.ops.linear_attention.block import bounded
from dist_attn.ops.linear_attention.triton_backward import Rows, Side, features_gradient, given_rows, policy_rows
from dist_attn.ops.linear_attention.triton_forward import (
    Gates,
    Plan,
    Stretch,
    either,
    make_plan,
    on_device,
    sequence_sums,
    tile_dtype,
)
from dist_attn.ops.linear_attention.triton_sums import read_kernel
from dist_attn.ops.linear_attention.triton_tiles import Tiles, tiles_for
from dist_attn.ops.plain_scan import plain_gradients
from dist_attn.ops.state import LinearState
from dist_attn.ops.watch import current_watch

__all__ = ["triton_absorb_keys", "triton_full_attention", "triton_read", "triton_read_undivided"]

_Optional = tuple[torch.Tensor | None, ...]


def triton_full_attention(
    q_BHLK: torch.Tensor,
    k_BHSK: torch.Tensor,
    v_BHSV: torch.Tensor,
    log_gate_BHS: torch.Tensor | None = None,
    key_scale_BHS: torch.Tensor | None = None,
    *,
    feature_map: FeatureMap | None,
    state: LinearState | None,
    denominator: Denominator,
    tiles: Tiles | None = None,
) -> tuple[torch.Tensor, LinearState]:
    """`linear_attention` that is not causal: every query reads the state after the last key.

    Shapes: q [B, H, L, K], k [B, H, S, K], v [B, H, S, V], gates [B, H, S] -> o [B, H, L, V] in v's dtype, the float32
        state after; S may be 0 after a state.
    """
    if state is None or k_BHSK.shape[2]:
        state = triton_absorb_keys(
            k_BHSK, v_BHSV, log_gate_BHS, key_scale_BHS, feature_map=feature_map, state=state, tiles=tiles
        )
    out = triton_read(q_BHLK, state, feature_map=feature_map, denominator=denominator, tiles=tiles)
    return out.to(v_BHSV.dtype), state


def triton_absorb_keys(
    k_BHSK: torch.Tensor,
    v_BHSV: torch.Tensor,
    log_gate_BHS: torch.Tensor | None = None,
    key_scale_BHS: torch.Tensor | None = None,
    *,
    feature_map: FeatureMap | None,
    state: LinearState | None,
    tiles: Tiles | None = None,
) -> LinearState:
    """`absorb_keys` of one sequence: the float32 state after the last key.

    Shapes: as `triton_full_attention`, S at least 1.
    """
    (batch, heads), size, values = k_BHSK.shape[:2], k_BHSK.shape[3], v_BHSV.shape[3]
    plan = make_plan(size, values, feature_map, Denominator("one"), tiles or tiles_for(k_BHSK, v_BHSV, feature_map))
    if state is None:
        state = LinearState.identity(batch, heads, plan.features, values, device=v_BHSV.device)
    state.check(batch, heads, plan.features, values)
    weight = None if key_scale_BHS is None else key_scale_BHS.float()
    s, z, mass, log_decay = state.s_BHMV, state.z_BHM, state.mass_BH, state.log_decay_BH
    if log_gate_BHS is not None:
        # Sums from the end, not differences of sums from the start: near the last key they keep their digits.
        remaining = bounded(log_gate_BHS, torch.float32).flip(2).cumsum(2).flip(2)
        left = F.pad(remaining[:, :, 1:], (0, 1)).exp()
        weight = left if weight is None else left * weight
        gain = remaining[:, :, 0].exp()
        s, z, mass = s * gain[..., None, None], z * gain[..., None], mass * gain
        log_decay = log_decay + remaining[:, :, 0]
    parameters = () if feature_map is None else feature_map.tensors()
    sums, zm = _Sums.apply(_Call(plan, feature_map), k_BHSK, v_BHSV, weight, *parameters)  # type: ignore[no-untyped-call]
    return LinearState(s + sums, z + zm[..., :-1], mass + zm[..., -1], log_decay, state.reset_BH)


def triton_read(
    q_BHLK: torch.Tensor,
    state: LinearState,
    *,
    feature_map: FeatureMap | None,
    denominator: Denominator,
    tiles: Tiles | None = None,
) -> torch.Tensor:
    """Outputs [B, H, L, V] in q's dtype of queries that see exactly `state`."""
    return _read(q_BHLK, state, feature_map, denominator, tiles, undivided=False)[0]


def triton_read_undivided(
    q_BHLK: torch.Tensor, state: LinearState, *, feature_map: FeatureMap | None, tiles: Tiles | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Numerators [B, H, L, V] and denominators [B, H, L] of the same queries, float32."""
    return _read(q_BHLK, state, feature_map, Denominator("one"), tiles, undivided=True)


class _Call(NamedTuple):
    plan: Plan
    feature_map: FeatureMap | None
    undivided: bool = False

    def stretch(self, x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor | None, parameters: _Optional) -> Stretch:
        """x and y of the whole sequence, as kernels take them."""
        x, y = (t if t.stride(-1) == 1 else t.contiguous() for t in (x, y))
        w = parameters[0].float().contiguous() if parameters and parameters[0] is not None else x
        return Stretch(x, x, y, w, None, weight, None)

    def features(self, x: torch.Tensor, parameters: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """All of phi(x), float32: for second derivatives."""
        return x.float() if self.feature_map is None else self.feature_map.with_tensors(*parameters)(x.float())


def _read(
    q: torch.Tensor,
    state: LinearState,
    feature_map: FeatureMap | None,
    denominator: Denominator,
    tiles: Tiles | None,
    *,
    undivided: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    s, zm = state.s_BHMV, torch.cat([state.z_BHM, state.mass_BH[..., None]], dim=-1)
    like_v = s[:, :, :0].to(q.dtype)
    plan = make_plan(q.shape[3], s.shape[3], feature_map, denominator, tiles or tiles_for(q, like_v, feature_map))
    state.check(q.shape[0], q.shape[1], plan.features, s.shape[3])
    parameters = () if feature_map is None else feature_map.tensors()
    call = _Call(plan, feature_map, undivided)
    out, den = _Read.apply(call, q, s, zm, *parameters)  # type: ignore[no-untyped-call]
    return out, den


class _Sums(torch.autograd.Function):
    """(k, v, weight, map's tensors) -> sums of weight phi(k) v^T [B, H, M, V] and of weight [phi(k), 1]."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: torch.Tensor | None) -> Any:
        k, v, weight, *parameters = tensors
        assert k is not None and v is not None
        stretch = call.stretch(k, v, weight, tuple(parameters))
        with on_device(v.device):
            weights = _weights(call.plan, stretch)
            sums, zm = sequence_sums(call.plan, stretch, stretch.k, stretch.v, (weights, weights, weights))
        ctx.call = call
        ctx.save_for_backward(*tensors)
        return sums.view(*v.shape[:2], *sums.shape[1:]), zm.view(*v.shape[:2], -1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        call, tensors, needs = ctx.call, ctx.saved_tensors, ctx.needs_input_grad[1:]
        k, v, weight, *parameters = tensors
        # Autograd turns gradients on inside backward if, and only if, this pass is to be differentiated in its turn.
        if torch.is_grad_enabled():
            inputs = tuple(t.view_as(t) if n and t is not None else t for t, n in zip(tensors, needs, strict=True))
            phi = call.features(inputs[0], inputs[3:])
            weighted = phi if inputs[2] is None else phi * inputs[2][..., None]
            count = weighted.new_ones(weighted.shape[:3]) if inputs[2] is None else inputs[2]
            sums = weighted.transpose(-1, -2) @ inputs[1].float()
            zm = torch.cat([weighted.sum(2), count.sum(2, keepdim=True)], dim=-1)
            return (None, *plain_gradients((sums, zm), grads, inputs, needs))
        stretch = call.stretch(k, v, weight, tuple(parameters))
        plan, grad_zm = call.plan, grads[1].flatten(0, 1).contiguous()
        grad_sums = grads[0].flatten(0, 1).to(tile_dtype(v.dtype)).contiguous()
        with on_device(v.device):
            ones = _ones(plan, stretch)
            gate = _gates(ones, None if weight is None else _weights(plan, stretch))
            side = Side(stretch.k, stretch.k, stretch.v, stretch.v, (ones, ones, ones), grad_sums, grad_zm, True)
            grad_k, grad_w, rows, _ = features_gradient(
                plan, stretch, gate, Rows(ones, ones, ones), side, bool(parameters) and needs[3], pairs=False
            )
            grad_v, _ = _launch_read(plan, stretch, stretch.k, grad_sums, grad_zm, gate.key_scale, v.dtype)
        grad_weight = None if weight is None else rows[:, : v.shape[2]].reshape(v.shape[:3])
        return (
            None,
            grad_k,
            grad_v,
            grad_weight,
            *(None if grad_w is None else grad_w.to(p.dtype) for p in parameters),
        )


class _Read(torch.autograd.Function):
    """(q, S, [z, mass], map's tensors) -> outputs [B, H, L, V] and denominators before any policy [B, H, L]."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: torch.Tensor) -> Any:
        q, s, zm, *parameters = tensors
        plan, stretch = call.plan, call.stretch(q, q, None, tuple(parameters))
        dtype = torch.float32 if call.undivided else q.dtype
        with on_device(q.device):
            state = s.flatten(0, 1).to(tile_dtype(q.dtype)).contiguous()
            out, den = _launch_read(plan, stretch, stretch.q, state, zm.flatten(0, 1).contiguous(), None, dtype)
        watch = current_watch()
        if watch is not None and not call.undivided and plan.policy.kind not in ("mass", "one"):
            watch.count(den, plan.policy.guard(den, zm[..., -1:].expand_as(den)))
        ctx.call = call
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(*tensors, den, *(() if call.undivided else (out,)))
        if not call.undivided:
            ctx.mark_non_differentiable(den)
        return out, den

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        call, needs = ctx.call, ctx.needs_input_grad[1:]
        tensors, (den, *outs) = ctx.saved_tensors[: len(needs)], ctx.saved_tensors[len(needs) :]
        q, s, zm, *parameters = tensors
        # As in `_Sums`.
        if torch.is_grad_enabled():
            return (None, *_differentiable_read(call, tensors, needs, grads))
        plan, stretch = call.plan, call.stretch(q, grads[0], None, tuple(parameters))
        with on_device(q.device):
            if call.undivided:
                rows = given_rows(plan, stretch, grads[1], torch.zeros_like(den))
            else:
                rows = policy_rows(plan, stretch, (outs[0], den, zm[..., -1:].expand_as(den)), stretch.v)
            weights = (rows.inverse, rows.grad_den, rows.grad_mass)
            grad_s, grad_zm = sequence_sums(plan, stretch, stretch.q, stretch.v, weights)
            state = s.flatten(0, 1).to(tile_dtype(q.dtype)).contiguous()
            side = Side(
                stretch.q, stretch.q, stretch.v, stretch.v, weights, state, zm.flatten(0, 1).contiguous(), False
            )
            grad_q, grad_w, _, _ = features_gradient(
                plan, stretch, _gates(rows.inverse, None), rows, side, bool(parameters) and needs[3], pairs=False
            )
        of_map = (None if grad_w is None else grad_w.to(p.dtype) for p in parameters)
        return None, grad_q, grad_s.view(s.shape), grad_zm.view(zm.shape), *of_map


def _differentiable_read(
    call: _Call, tensors: tuple[torch.Tensor, ...], needs: tuple[bool, ...], grads: tuple[torch.Tensor, ...]
) -> list[torch.Tensor | None]:
    inputs = tuple(t.view_as(t) if n else t for t, n in zip(tensors, needs, strict=True))
    q, s, zm, *parameters = inputs
    phi = call.features(q, tuple(parameters))
    num, den = phi @ s, (phi * zm[:, :, None, :-1]).sum(-1)
    if call.undivided:
        return plain_gradients((num, den), grads, inputs, needs)
    out = num / call.plan.policy.guard(den, zm[..., -1:].expand_as(den))[..., None]
    return plain_gradients((out.to(q.dtype),), grads[:1], inputs, needs)


def _launch_read(
    plan: Plan,
    stretch: Stretch,
    x: torch.Tensor,
    state: torch.Tensor,
    zm: torch.Tensor,
    weight: torch.Tensor | None,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [B, H, L, V] in `dtype` and denominators [B, H, L]; see `read_kernel`."""
    batch, heads, tokens, size = x.shape
    values, chunks = state.shape[2], plan.blocks(tokens, plan.tiles.chunk)
    out = torch.empty((batch, heads, tokens, values), dtype=dtype, device=x.device)
    den = torch.empty((batch, heads, tokens), device=x.device)
    read_kernel[(chunks * batch * heads, plan.blocks(values, plan.tiles.block_v))](
        x, stretch.w, either(weight, den), state, zm, out, den, *x.stride()[:3], *out.stride()[:3],
        tokens, chunks, heads, size, plan.projections, plan.features, values, plan.scale, plan.policy.eps,
        KIND=plan.policy.kind, HAS_WEIGHT=weight is not None, **plan.constants(x.dtype),
    )  # fmt: skip
    return out, den


def _ones(plan: Plan, stretch: Stretch) -> torch.Tensor:
    return torch.ones(
        (stretch.v.shape[0] * stretch.v.shape[1], stretch.chunks(plan) * plan.tiles.chunk), device=stretch.v.device
    )


def _weights(plan: Plan, stretch: Stretch) -> torch.Tensor:
    """Of every key, [G, N T]; 0 behind the last one."""
    tokens = stretch.v.shape[2]
    ones = _ones(plan, stretch)
    ones[:, tokens:] = 0.0
    if stretch.key_scale is None:
        return ones
    return F.pad(stretch.key_scale.flatten(0, 1), (0, ones.shape[1] - tokens))


def _gates(ones: torch.Tensor, key_scale: torch.Tensor | None) -> Gates:
    """No gates: everything that is not there in their place."""
    return Gates(ones, ones, ones, ones, key_scale)
