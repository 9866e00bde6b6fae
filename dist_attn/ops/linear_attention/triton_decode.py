"""The decode step as one GPU kernel: features of the token, update and read-out in one pass over the state.

Shape letters: B batch, H heads, G = B H, K head size, D projections, M features, V values.
"""

import torch
import triton
import triton.language as tl

from dist_attn.ops.kernel_operation import present
from dist_attn.ops.linear_attention.call import LinearCall
from dist_attn.ops.linear_attention.triton_features import features, load_projections
from dist_attn.ops.linear_attention.triton_forward import KernelPlan, blocks, either, on_device
from dist_attn.ops.linear_attention.triton_outputs import guard
from dist_attn.ops.linear_attention.triton_tiles import Tiles, power_tile
from dist_attn.ops.state import LinearState, writes_in_place
from dist_attn.ops.watch import current_watch

# A program keeps twice [16, 128] of the state in registers while two more such tiles, and w's, are on their way.
STEP_TILES = Tiles(block_d=16, block_v=128, warps=4, stages=3)


@triton.jit
def _vector(x_ptr, K, UNIT: tl.constexpr, BLOCK_X: tl.constexpr):
    """x / |x| (x without UNIT) as a row [1, BLOCK_X] in float32."""
    inputs = tl.arange(0, BLOCK_X)
    x = tl.load(x_ptr + inputs, mask=inputs < K, other=0.0).to(tl.float32)
    if UNIT:
        length = tl.sqrt(tl.sum(x * x, axis=0))
        x = x / tl.where(length == 0.0, 1.0, length)
    return x[None, :]


@triton.jit
def _token_features(x_ptr, x, w, outputs, K, D, scale, MAP: tl.constexpr):
    """The two parts of phi(x), [BLOCK_D] each."""
    if MAP == "none" or MAP == "elu":
        projected = tl.load(x_ptr + outputs, mask=outputs < K, other=0.0).to(tl.float32)[None, :]
    else:
        projected = tl.sum(w * tl.trans(x), axis=0)[None, :]
    first, second = features(projected, (outputs < D)[None, :], scale, MAP, "ieee")
    return tl.sum(first, axis=0), tl.sum(second, axis=0)


@triton.jit
def _part(
    s_ptr, z_ptr, s_out_ptr, z_out_ptr, rows, there, values, V, gate, k, q, v, num, den
):  # fmt: skip
    """Some rows of the state: updated by k and v, stored, and read by q."""
    at = rows[:, None] * V + values[None, :]
    mask = there[:, None] & (values[None, :] < V)
    s = tl.load(s_ptr + at, mask=mask, other=0.0) * gate + k[:, None] * v[None, :]
    z = tl.load(z_ptr + rows, mask=there, other=0.0) * gate + k
    tl.store(s_out_ptr + at, s, mask=mask)
    tl.store(z_out_ptr + rows, z, mask=there & (tl.program_id(1) == 0))
    return num + tl.sum(q[:, None] * s, axis=0), den + tl.sum(q * z, axis=0)


@triton.jit
def step_kernel(
    q_ptr, k_ptr, v_ptr, w_ptr, log_gate_ptr, key_scale_ptr, s_ptr, z_ptr, mass_ptr,
    out_ptr, s_out_ptr, z_out_ptr, mass_out_ptr, guarded_ptr,
    H, K: tl.constexpr, D: tl.constexpr, M: tl.constexpr, V: tl.constexpr, scale, eps,
    KIND: tl.constexpr, HAS_GATE: tl.constexpr, HAS_SCALE: tl.constexpr, MAP: tl.constexpr, UNIT: tl.constexpr,
    BLOCK_X: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One token of one head. Grid: G x blocks of values."""
    group = tl.program_id(0).to(tl.int64)
    w_ptr += (group % H) * D * K
    s_ptr, s_out_ptr = s_ptr + group * M * V, s_out_ptr + group * M * V
    z_ptr, z_out_ptr = z_ptr + group * M, z_out_ptr + group * M
    values = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    q = _vector(q_ptr + group * K, K, UNIT, BLOCK_X)
    k = _vector(k_ptr + group * K, K, UNIT, BLOCK_X)
    v = tl.load(v_ptr + group * V + values, mask=values < V, other=0.0).to(tl.float32)
    gate = 1.0
    key_scale = 1.0
    if HAS_GATE:
        gate = tl.exp(tl.load(log_gate_ptr + group).to(tl.float32))
    if HAS_SCALE:
        key_scale = tl.load(key_scale_ptr + group).to(tl.float32)
    num = tl.zeros((BLOCK_V,), tl.float32)
    den = tl.sum(tl.zeros((BLOCK_V,), tl.float32), axis=0)
    for d in tl.range(0, D, BLOCK_D, num_stages=STAGES):
        outputs = d + tl.arange(0, BLOCK_D)
        w = tl.zeros((1, BLOCK_D), tl.float32)
        if MAP == "gaussian" or MAP == "arc_cosine":
            w = load_projections(w_ptr, tl.arange(0, BLOCK_X), outputs, K, D)
        q_first, q_second = _token_features(q_ptr + group * K, q, w, outputs, K, D, scale, MAP)
        k_first, k_second = _token_features(k_ptr + group * K, k, w, outputs, K, D, scale, MAP)
        num, den = _part(
            s_ptr, z_ptr, s_out_ptr, z_out_ptr, outputs, outputs < D, values, V,
            gate, k_first * key_scale, q_first, v, num, den,
        )  # fmt: skip
        if MAP == "gaussian":
            num, den = _part(
                s_ptr, z_ptr, s_out_ptr, z_out_ptr, outputs + D, outputs < D, values, V,
                gate, k_second * key_scale, q_second, v, num, den,
            )  # fmt: skip
    mass = tl.load(mass_ptr + group) * gate + key_scale
    divisor = guard(den, mass, eps, KIND)
    tl.store(out_ptr + group * V + values, (num / divisor).to(out_ptr.dtype.element_ty), mask=values < V)
    if tl.program_id(1) == 0:
        tl.store(mass_out_ptr + group, mass)
        tl.store(guarded_ptr + group, tl.abs(divisor - den) > 0.0)


def triton_linear_attention_step(call: LinearCall) -> tuple[torch.Tensor, LinearState]:
    """`linear_attention_step` of a call of one token without gradients, by one kernel.

    Its state is left as it is but inside `steps_in_place`.

    Shapes: q, k [B, H, 1, K], v [B, H, 1, V], gates [B, H, 1] -> o [B, H, V] in v's dtype, the float32 state after.
    Cost: one read and one write of the state, in place or not, beside w once for every B H.
    """
    state, policy = call.state, call.denominator
    assert state is not None  # a step goes on from one
    q, k, v, log_gate, key_scale = (None if t is None else t.detach()[:, :, 0].contiguous() for t in call.sequence)
    q, k, v = map(present, (q, k, v))
    (batch, heads, size), values = q.shape, v.shape[2]
    plan = KernelPlan.of(size, values, call.feature_map, policy, STEP_TILES)
    state.check(batch, heads, plan.features, values)
    w = state.s_BHMV if call.map_tensor is None else call.map_tensor
    before = [t.detach().contiguous() for t in state.tensors()[:3]]
    s, z, mass = after = [torch.empty_like(t) for t in before]
    if writes_in_place() and state.s_BHMV.is_contiguous():
        # z and the mass, which programs of other values read too, may not change meanwhile.
        s = after[0] = state.s_BHMV
    out, guarded = torch.empty_like(v), torch.empty_like(mass, dtype=torch.bool)
    with on_device(v.device):
        step_kernel[(mass.numel(), blocks(values, plan.tiles.block_v))](
            q, k, v, w.detach().float().contiguous(), either(log_gate, mass), either(key_scale, mass), *before,
            out, *after, guarded, heads, size, plan.projections, plan.features, values, plan.scale, policy.eps,
            KIND=policy.kind, HAS_GATE=log_gate is not None, HAS_SCALE=key_scale is not None,
            MAP=plan.map, UNIT=plan.unit_norm, BLOCK_X=power_tile(size),
            BLOCK_D=plan.tiles.block_d, BLOCK_V=plan.tiles.block_v, STAGES=plan.tiles.stages,
            num_warps=plan.tiles.warps,
        )  # fmt: skip
    watch = current_watch()
    if watch is not None and policy.is_watched:
        watch.count(guarded)
    log_decay_BH = state.log_decay_BH
    if log_gate is not None:
        log_decay_BH = log_decay_BH + log_gate.to(log_decay_BH.dtype)
    return out, LinearState(s, z, mass, log_decay_BH, state.reset_BH)
