"""Attention that is not causal by GPU kernels: the sums that all keys leave behind, and queries that read one state.

Neither makes features of the whole sequence, nor a state for each chunk. Gates are weights of keys here: what is left
of each after the last one, times its scale. Sums and read-outs are operations of their own, because a pass that is cut
across ranks exchanges states between them.

Shape letters: B batch, H heads, L queries, S keys, K head size, V values, M features; G = B H, N chunks of T tokens.
"""

from dataclasses import dataclass, replace
from typing import Generic, NamedTuple

import torch
import torch.nn.functional as F

from dist_attn.ops.denominator import Denominator
from dist_attn.ops.device import running_sums
from dist_attn.ops.feature_map import FeatureMap
from dist_attn.ops.kernel_operation import Each, KernelOperation, Tensors, present
from dist_attn.ops.linear_attention.block import bounded
from dist_attn.ops.linear_attention.call import LinearCall
from dist_attn.ops.linear_attention.differentiable import converted, map_of, sums_of
from dist_attn.ops.linear_attention.triton_backward import (
    DivisorRows,
    Side,
    features_gradient,
    policy_rows,
    undivided_rows,
)
from dist_attn.ops.linear_attention.triton_forward import (
    Attended,
    Gates,
    KernelPlan,
    StateSums,
    Stretch,
    TokenWeights,
    map_operand,
    on_device,
    read,
    rowwise,
    sequence_sums,
    tile_dtype,
)
from dist_attn.ops.linear_attention.triton_tiles import tiles_for
from dist_attn.ops.state import LinearState


class SumInputs(NamedTuple, Generic[Each]):
    """A value for each tensor of sums over keys; `weight` is what counts of each key."""

    k: Each
    v: Each
    weight: Each
    w: Each


class ReadInputs(NamedTuple, Generic[Each]):
    """A value for each tensor of a read-out; `zm` is z beside the mass."""

    q: Each
    s: Each
    zm: Each
    w: Each


SumTensors = SumInputs[torch.Tensor | None]
ReadTensors = ReadInputs[torch.Tensor | None]


def triton_full_attention(call: LinearCall) -> tuple[torch.Tensor, LinearState]:
    """`linear_attention` of a call that is not causal: every query reads the state after the last key.

    Shapes: q [B, H, L, K], k [B, H, S, K], v [B, H, S, V], gates [B, H, S] -> o [B, H, L, V] in v's dtype, the float32
        state after; S may be 0 after a state.
    """
    state = call.state
    if state is None or call.keys:
        state = triton_absorb_keys(call)
    out, _ = triton_read(replace(call, state=state))
    return out.to(call.v_BHSV.dtype), state


def triton_absorb_keys(call: LinearCall) -> LinearState:
    """`absorb_keys` of one sequence: the float32 state after the last key.

    Shapes: as `triton_full_attention`, S at least 1.
    """
    _, k, v, log_gate, key_scale = call.sequence
    plan = KernelPlan.of(
        k.shape[3], v.shape[3], call.feature_map, Denominator("one"), tiles_for(k, v, call.feature_map)
    )
    state = call.state_before(plan.features)
    weight = None if key_scale is None else key_scale.float()
    s, z, mass, log_decay = state.s_BHMV, state.z_BHM, state.mass_BH, state.log_decay_BH
    if log_gate is not None:
        # Sums from the end, not differences of sums from the start: near the last key they keep their digits.
        remaining = running_sums(bounded(log_gate, torch.float32).flip(2)).flip(2)
        left = F.pad(remaining[:, :, 1:], (0, 1)).exp()
        weight = left if weight is None else left * weight
        gain = remaining[:, :, 0].exp()
        s, z, mass = s * gain[..., None, None], z * gain[..., None], mass * gain
        log_decay = log_decay + remaining[:, :, 0]
    sums, zm = map(present, _Sums(plan, call.feature_map)(SumInputs(k, v, weight, call.map_tensor)))
    return LinearState(s + sums, z + zm[..., :-1], mass + zm[..., -1], log_decay, state.reset_BH)


def triton_read(call: LinearCall, *, undivided: bool = False) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Outputs [B, H, L, V] in q's dtype of the call's queries, which see exactly its state; no denominators.

    With `undivided` float32 numerators [B, H, L, V] and denominators [B, H, L].
    """
    q, state = call.q_BHLK, call.state
    assert state is not None  # what is read
    s, zm = sums_of(state)
    policy = Denominator("one") if undivided else call.denominator
    tiles = tiles_for(q, s[:, :, :0].to(q.dtype), call.feature_map)
    plan = KernelPlan.of(q.shape[3], s.shape[3], call.feature_map, policy, tiles)
    state.check(*q.shape[:2], plan.features, s.shape[3])
    out, *den = _Read(plan, call.feature_map, undivided)(ReadInputs(q, s, zm, call.map_tensor))
    return present(out), den[0] if undivided else None


@dataclass(frozen=True)
class _Sums(KernelOperation[SumTensors]):
    """Sums of weight phi(k) v^T [B, H, M, V] and of weight [phi(k), 1]."""

    plan: KernelPlan
    feature_map: FeatureMap | None

    def forward(self, x: SumTensors, *, keep: bool) -> tuple[Tensors, Tensors]:
        v = present(x.v)
        stretch = _stretch(self.plan, x.k, v, x.w)
        with on_device(v.device):
            weights = TokenWeights.all(_weights(stretch, x.weight))
            sums, zm = sequence_sums(stretch, stretch.k, stretch.v, weights, stretch.k.dtype)
        return (sums.view(*v.shape[:2], *sums.shape[1:]), zm.view(*v.shape[:2], -1)), ()

    def backward(self, x: SumTensors, needs: SumTensors, grads: Tensors, kept: Tensors) -> SumTensors:
        v = present(x.v)
        stretch = _stretch(self.plan, x.k, v, x.w)._replace(key_scale=x.weight)
        with on_device(v.device):
            of_sums, ones = _one_state(grads[0], grads[1], v.dtype), stretch.ones()
            gate = _gates(ones, None if x.weight is None else _weights(stretch, x.weight))
            grad = stretch.k.new_empty(stretch.k.shape)
            side = Side(stretch.k, stretch.k, stretch.v, stretch.v, TokenWeights.all(ones), of_sums, grad, True)
            with_map = x.w is not None and bool(needs.w)
            of_k = features_gradient(stretch, gate, DivisorRows(ones, ones, ones), side, with_map, pairs=False)
            grad_v, _ = read(stretch, stretch.k, of_sums, gate.key_scale, v.dtype)
        grad_weight = None if x.weight is None else of_k.rows[:, : v.shape[2]].reshape(v.shape[:3])
        return SumInputs(grad, grad_v, grad_weight, converted(of_k.w, x.w))

    def replay(self, x: SumTensors) -> Tensors:
        phi = _features(self.feature_map, x.k, x.w)
        weighted = phi if x.weight is None else phi * x.weight[..., None]
        count = weighted.new_ones(weighted.shape[:3]) if x.weight is None else x.weight
        zm = torch.cat([weighted.sum(2), count.sum(2, keepdim=True)], dim=-1)
        return weighted.transpose(-1, -2) @ present(x.v).float(), zm


@dataclass(frozen=True)
class _Read(KernelOperation[ReadTensors]):
    """Outputs [B, H, L, V]; `undivided` also denominators before any policy [B, H, L]."""

    plan: KernelPlan
    feature_map: FeatureMap | None
    undivided: bool

    def forward(self, x: ReadTensors, *, keep: bool) -> tuple[Tensors, Tensors]:
        q, zm = present(x.q), present(x.zm)
        stretch = _stretch(self.plan, q, q, x.w)
        with on_device(q.device):
            state = _one_state(x.s, zm, q.dtype)
            out, den = read(stretch, stretch.q, state, None, torch.float32 if self.undivided else q.dtype)
        if not self.undivided and self.plan.policy.is_watched:
            self.plan.policy.tell_watch(den, zm[..., -1:].expand_as(den))
        return ((out, den), ()) if self.undivided else ((out,), (out, den))

    def backward(self, x: ReadTensors, needs: ReadTensors, grads: Tensors, kept: Tensors) -> ReadTensors:
        q, s, zm, grad_out = present(x.q), present(x.s), present(x.zm), present(grads[0])
        stretch = _stretch(self.plan, q, grad_out, x.w)
        with on_device(q.device):
            if self.undivided:
                grad_den = present(grads[1])
                made = undivided_rows(stretch, grad_den, torch.zeros_like(grad_den))
            else:
                out, den = map(present, kept)
                made = policy_rows(stretch, Attended(out, den, zm[..., -1:].expand_as(den)), stretch.v)
            rows, weights = DivisorRows(*made), TokenWeights(*made)
            of_state = sequence_sums(stretch, stretch.q, stretch.v, weights, q.dtype)
            state = _one_state(s, zm, q.dtype)
            grad = stretch.q.new_empty(stretch.q.shape)
            side = Side(stretch.q, stretch.q, stretch.v, stretch.v, weights, state, grad, False)
            with_map = x.w is not None and bool(needs.w)
            of_q = features_gradient(stretch, _gates(rows.inverse, None), rows, side, with_map, pairs=False)
        return ReadInputs(grad, of_state.s.view(s.shape), of_state.zm.view(zm.shape), converted(of_q.w, x.w))

    def replay(self, x: ReadTensors) -> Tensors:
        q, s, zm = present(x.q), present(x.s), present(x.zm)
        phi = _features(self.feature_map, q, x.w)
        num, den = phi @ s, (phi * zm[:, :, None, :-1]).sum(-1)
        if self.undivided:
            return num, den
        return ((num / self.plan.policy.guard(den, zm[..., -1:].expand_as(den))[..., None]).to(q.dtype),)


def _stretch(plan: KernelPlan, x: torch.Tensor | None, y: torch.Tensor, w: torch.Tensor | None) -> Stretch:
    """x and y of the whole sequence, as kernels take them."""
    x, y = rowwise(present(x)), rowwise(y)
    return Stretch(plan, x, x, y, x if w is None else map_operand(w, x.dtype))


def _features(feature_map: FeatureMap | None, x: torch.Tensor | None, w: torch.Tensor | None) -> torch.Tensor:
    """All of phi(x), float32: for second derivatives."""
    phi, x = map_of(feature_map, w), present(x).float()
    return x if phi is None else phi(x)


def _one_state(s: torch.Tensor | None, zm: torch.Tensor | None, dtype: torch.dtype) -> StateSums:
    """A state, or the gradient of one, as it enters products: [G, M, V] and [G, M + 1]."""
    s, zm = present(s).flatten(0, 1), present(zm).flatten(0, 1)
    return StateSums(s.to(tile_dtype(dtype)).contiguous(), zm.contiguous())


def _weights(stretch: Stretch, weight: torch.Tensor | None) -> torch.Tensor:
    """Of every key, [G, N T]; 0 behind the last one."""
    return stretch.filled(torch.ones(stretch.v.shape[:3], device=stretch.v.device) if weight is None else weight)


def _gates(ones: torch.Tensor, key_scale: torch.Tensor | None) -> Gates:
    """No gates: everything that is not there in their place."""
    return Gates(ones, ones, ones, ones, key_scale)
