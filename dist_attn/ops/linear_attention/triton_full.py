"""Attention that is not causal by GPU kernels: the sums that all keys leave behind, and queries that read one state.

Neither makes features of the whole sequence, nor a state for each chunk. Gates are weights of keys here: what is left
of each after the last one, times its scale. Sums and read-outs are functions of their own, because a pass that is cut
across ranks exchanges states between them.
"""

from typing import Any, Generic, NamedTuple

import torch
import torch.nn.functional as F

from dist_attn.ops.denominator import Denominator
from dist_attn.ops.feature_map import FeatureMap
from dist_attn.ops.linear_attention.block import bounded
from dist_attn.ops.linear_attention.call import LinearCall
from dist_attn.ops.linear_attention.differentiable import Each, gradients_of_replay, present, sums_of
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
from dist_attn.ops.state import LinearState
from dist_attn.ops.watch import current_watch

_Optional = tuple[torch.Tensor | None, ...]


def triton_full_attention(call: LinearCall, *, tiles: Tiles | None = None) -> tuple[torch.Tensor, LinearState]:
    """`linear_attention` that is not causal: every query reads the state after the last key.

    Shapes: q [B, H, L, K], k [B, H, S, K], v [B, H, S, V], gates [B, H, S] -> o [B, H, L, V] in v's dtype, the float32
        state after; S may be 0 after a state.
    """
    state = call.state
    if state is None or call.keys:
        state = triton_absorb_keys(call, tiles=tiles)
    out = triton_read(call.q_BHLK, state, feature_map=call.feature_map, denominator=call.denominator, tiles=tiles)
    return out.to(call.v_BHSV.dtype), state


def triton_absorb_keys(call: LinearCall, *, tiles: Tiles | None = None) -> LinearState:
    """`absorb_keys` of one sequence: the float32 state after the last key.

    Shapes: as `triton_full_attention`, S at least 1.
    """
    _, k, v, log_gate, key_scale = call.sequence
    (batch, heads), size, values, state = k.shape[:2], k.shape[3], v.shape[3], call.state
    plan = make_plan(size, values, call.feature_map, Denominator("one"), tiles or tiles_for(k, v, call.feature_map))
    if state is None:
        state = LinearState.identity(batch, heads, plan.features, values, device=v.device)
    state.check(batch, heads, plan.features, values)
    weight = None if key_scale is None else key_scale.float()
    s, z, mass, log_decay = state.s_BHMV, state.z_BHM, state.mass_BH, state.log_decay_BH
    if log_gate is not None:
        # Sums from the end, not differences of sums from the start: near the last key they keep their digits.
        remaining = bounded(log_gate, torch.float32).flip(2).cumsum(2).flip(2)
        left = F.pad(remaining[:, :, 1:], (0, 1)).exp()
        weight = left if weight is None else left * weight
        gain = remaining[:, :, 0].exp()
        s, z, mass = s * gain[..., None, None], z * gain[..., None], mass * gain
        log_decay = log_decay + remaining[:, :, 0]
    w = next(iter(call.map_tensors), None)
    sums, zm = _Sums.apply(_Launch(plan, call.feature_map), k, v, weight, w)  # type: ignore[no-untyped-call]
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


class _Launch(NamedTuple):
    plan: Plan
    feature_map: FeatureMap | None
    undivided: bool = False

    def stretch(self, x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor | None, w: torch.Tensor | None) -> Stretch:
        """x and y of the whole sequence, as kernels take them."""
        x, y = (t if t.stride(-1) == 1 else t.contiguous() for t in (x, y))
        return Stretch(x, x, y, x if w is None else w.float().contiguous(), None, weight, None)

    def features(self, x: torch.Tensor, w: torch.Tensor | None) -> torch.Tensor:
        """All of phi(x), float32: for second derivatives."""
        if self.feature_map is None:
            return x.float()
        return (self.feature_map if w is None else self.feature_map.with_tensors(w))(x.float())


class _SumInputs(NamedTuple, Generic[Each]):
    """A value for each tensor of `_Sums`."""

    k: Each
    v: Each
    weight: Each
    w: Each


class _ReadInputs(NamedTuple, Generic[Each]):
    """A value for each tensor of `_Read`; `zm` is z beside the mass."""

    q: Each
    s: Each
    zm: Each
    w: Each


def _read(
    q: torch.Tensor,
    state: LinearState,
    feature_map: FeatureMap | None,
    denominator: Denominator,
    tiles: Tiles | None,
    *,
    undivided: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    s, zm = sums_of(state)
    like_v = s[:, :, :0].to(q.dtype)
    plan = make_plan(q.shape[3], s.shape[3], feature_map, denominator, tiles or tiles_for(q, like_v, feature_map))
    state.check(q.shape[0], q.shape[1], plan.features, s.shape[3])
    w = next(iter(() if feature_map is None else feature_map.tensors()), None)
    out, den = _Read.apply(_Launch(plan, feature_map, undivided), q, s, zm, w)  # type: ignore[no-untyped-call]
    return out, den


class _Sums(torch.autograd.Function):
    """(k, v, weight, w) -> sums of weight phi(k) v^T [B, H, M, V] and of weight [phi(k), 1]."""

    @staticmethod
    def forward(ctx: Any, launch: _Launch, *tensors: torch.Tensor | None) -> Any:
        x: _SumInputs[torch.Tensor | None] = _SumInputs(*tensors)
        v = present(x.v)
        stretch = launch.stretch(present(x.k), v, x.weight, x.w)
        with on_device(v.device):
            weights = _weights(launch.plan, stretch)
            sums, zm = sequence_sums(launch.plan, stretch, stretch.k, stretch.v, (weights, weights, weights))
        ctx.launch = launch
        ctx.save_for_backward(*x)
        return sums.view(*v.shape[:2], *sums.shape[1:]), zm.view(*v.shape[:2], -1)

    @staticmethod
    def backward(ctx: Any, grad_sums: torch.Tensor, grad_zm: torch.Tensor) -> Any:
        launch: _Launch = ctx.launch
        x: _SumInputs[torch.Tensor | None] = _SumInputs(*ctx.saved_tensors)
        _, *asked = ctx.needs_input_grad

        def replay(x: _SumInputs[torch.Tensor | None]) -> tuple[torch.Tensor, torch.Tensor]:
            phi = launch.features(present(x.k), x.w)
            weighted = phi if x.weight is None else phi * x.weight[..., None]
            count = weighted.new_ones(weighted.shape[:3]) if x.weight is None else x.weight
            zm = torch.cat([weighted.sum(2), count.sum(2, keepdim=True)], dim=-1)
            return weighted.transpose(-1, -2) @ present(x.v).float(), zm

        # Autograd turns gradients on inside backward if, and only if, this pass is to be differentiated in its turn.
        if torch.is_grad_enabled():
            return (None, *gradients_of_replay(replay, x, asked, (grad_sums, grad_zm)))
        plan, v, needs = launch.plan, present(x.v), _SumInputs(*asked)
        stretch = launch.stretch(present(x.k), v, x.weight, x.w)
        of_sums = grad_sums.flatten(0, 1).to(tile_dtype(v.dtype)).contiguous()
        of_zm = grad_zm.flatten(0, 1).contiguous()
        with on_device(v.device):
            ones = _ones(plan, stretch)
            gate = _gates(ones, None if x.weight is None else _weights(plan, stretch))
            side = Side(stretch.k, stretch.k, stretch.v, stretch.v, (ones, ones, ones), of_sums, of_zm, True)
            with_map = x.w is not None and needs.w
            grad_k, grad_w, rows, _ = features_gradient(
                plan, stretch, gate, Rows(ones, ones, ones), side, with_map, pairs=False
            )
            grad_v, _ = _launch_read(plan, stretch, stretch.k, of_sums, of_zm, gate.key_scale, v.dtype)
        grad_weight = None if x.weight is None else rows[:, : v.shape[2]].reshape(v.shape[:3])
        return (None, *_SumInputs(grad_k, grad_v, grad_weight, _like(grad_w, x.w)))


class _Read(torch.autograd.Function):
    """(q, S, [z, mass], w) -> outputs [B, H, L, V] and denominators before any policy [B, H, L]."""

    @staticmethod
    def forward(ctx: Any, launch: _Launch, *tensors: torch.Tensor | None) -> Any:
        x: _ReadInputs[torch.Tensor | None] = _ReadInputs(*tensors)
        q, s, zm = present(x.q), present(x.s), present(x.zm)
        plan, stretch = launch.plan, launch.stretch(q, q, None, x.w)
        dtype = torch.float32 if launch.undivided else q.dtype
        with on_device(q.device):
            state = s.flatten(0, 1).to(tile_dtype(q.dtype)).contiguous()
            out, den = _launch_read(plan, stretch, stretch.q, state, zm.flatten(0, 1).contiguous(), None, dtype)
        watch = current_watch()
        if watch is not None and not launch.undivided and plan.policy.kind not in ("mass", "one"):
            watch.count(den, plan.policy.guard(den, zm[..., -1:].expand_as(den)))
        ctx.launch = launch
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(*x, den, None if launch.undivided else out)
        if not launch.undivided:
            ctx.mark_non_differentiable(den)
        return out, den

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor, grad_den: torch.Tensor) -> Any:
        launch: _Launch = ctx.launch
        *tensors, den, out = ctx.saved_tensors
        x: _ReadInputs[torch.Tensor | None] = _ReadInputs(*tensors)
        _, *asked = ctx.needs_input_grad
        plan = launch.plan

        def replay(x: _ReadInputs[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
            q, s, zm = present(x.q), present(x.s), present(x.zm)
            phi = launch.features(q, x.w)
            num, den = phi @ s, (phi * zm[:, :, None, :-1]).sum(-1)
            if launch.undivided:
                return num, den
            out = num / plan.policy.guard(den, zm[..., -1:].expand_as(den))[..., None]
            return out.to(q.dtype), None

        if torch.is_grad_enabled():  # as in `_Sums`
            return (None, *gradients_of_replay(replay, x, asked, (grad_out, grad_den)))
        q, s, zm, needs = present(x.q), present(x.s), present(x.zm), _ReadInputs(*asked)
        stretch = launch.stretch(q, grad_out, None, x.w)
        with on_device(q.device):
            if launch.undivided:
                rows = given_rows(plan, stretch, grad_den, torch.zeros_like(den))
            else:
                rows = policy_rows(plan, stretch, (out, den, zm[..., -1:].expand_as(den)), stretch.v)
            weights = (rows.inverse, rows.grad_den, rows.grad_mass)
            grad_s, grad_zm = sequence_sums(plan, stretch, stretch.q, stretch.v, weights)
            state, zm_state = s.flatten(0, 1).to(tile_dtype(q.dtype)).contiguous(), zm.flatten(0, 1).contiguous()
            side = Side(stretch.q, stretch.q, stretch.v, stretch.v, weights, state, zm_state, False)
            with_map = x.w is not None and needs.w
            grad_q, grad_w, _, _ = features_gradient(
                plan, stretch, _gates(rows.inverse, None), rows, side, with_map, pairs=False
            )
        return (None, *_ReadInputs(grad_q, grad_s.view(s.shape), grad_zm.view(zm.shape), _like(grad_w, x.w)))


def _like(grad: torch.Tensor | None, x: torch.Tensor | None) -> torch.Tensor | None:
    return None if grad is None or x is None else grad.to(x.dtype)


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
