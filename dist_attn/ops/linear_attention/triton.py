"""Causal linear attention by GPU kernels: chunk-parallel, features never in memory, sums in float32.

Three passes over a stretch of tokens, each parallel over its chunks: what every chunk leaves behind, a scan of these
over the chunks, outputs. As many tokens form a stretch as have states of at most 1 GiB, so memory above inputs and
outputs is bounded for any length. The backward pass makes the states again.

Importing this module needs triton; `implementation.choose` says whether a call can come here.
"""

from typing import Any, NamedTuple

import torch

from dist_attn.ops.denominator import Denominator
from dist_attn.ops.documents import document_numbers
from dist_attn.ops.feature_map import FeatureMap
from dist_attn.ops.linear_attention.differentiable import Attention, again, attention_again, state_after, sums_of
from dist_attn.ops.linear_attention.triton_backward import given_rows, policy_rows, stretch_gradients
from dist_attn.ops.linear_attention.triton_forward import Plan, Stretch, gates, make_plan, on_device, outputs, states
from dist_attn.ops.linear_attention.triton_tiles import Tiles, tiles_for
from dist_attn.ops.state import LinearState
from dist_attn.ops.watch import current_watch

__all__ = ["triton_linear_attention"]

STATE_BYTES = 2**30

_Tensors = tuple[torch.Tensor, ...]
_Optional = tuple[torch.Tensor | None, ...]


class _Call(NamedTuple):
    plan: Plan
    feature_map: FeatureMap | None
    documents: tuple[int, ...]
    differentiable: Attention
    undivided: bool = False  # what comes out is [numerators, denominators, masses], float32


def triton_linear_attention(
    q_BHLK: torch.Tensor,
    k_BHLK: torch.Tensor,
    v_BHLV: torch.Tensor,
    log_gate_BHL: torch.Tensor | None = None,
    key_scale_BHL: torch.Tensor | None = None,
    *,
    feature_map: FeatureMap | None,
    state: LinearState | None,
    denominator: Denominator,
    documents: tuple[int, ...],
    differentiable: Attention,
    undivided: bool = False,
    tiles: Tiles | None = None,
) -> tuple[torch.Tensor, LinearState]:
    """`linear_attention` of as many queries as keys, causal; `undivided`, as `local_sums`.

    `differentiable` is the same function in another implementation: what a backward pass that is to be differentiated
    again goes through.

    Shapes: q, k [B, H, L, K], v [B, H, L, V], gates [B, H, L] -> o [B, H, L, V] in v's dtype, or float32
        [B, H, L, V + 2] of numerators, denominators and masses; the float32 state after.
    """
    batch, heads, _, size = q_BHLK.shape
    values = v_BHLV.shape[3]
    plan = make_plan(size, values, feature_map, denominator, tiles or tiles_for(q_BHLK, v_BHLV, feature_map))
    call = _Call(plan, feature_map, documents, differentiable, undivided)
    if state is None:
        state = LinearState.identity(batch, heads, plan.features, values, device=v_BHLV.device)
    state.check(batch, heads, plan.features, values)
    _, zm_BHE = sums_of(state)
    parameters = () if feature_map is None else feature_map.tensors()
    out, s_BHMV, zm_BHE = _Kernels.apply(  # type: ignore[no-untyped-call]
        call, q_BHLK, k_BHLK, v_BHLV, log_gate_BHL, key_scale_BHL, state.s_BHMV, zm_BHE, *parameters
    )
    return out, state_after(state, s_BHMV, zm_BHE, log_gate_BHL, documents)


class _Kernels(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: torch.Tensor | None) -> Any:
        v, s, zm = tensors[2], tensors[5], tensors[6]
        assert v is not None and s is not None and zm is not None
        result = torch.empty(v.shape, dtype=v.dtype, device=v.device)
        if call.undivided:
            result = torch.empty((*v.shape[:3], v.shape[3] + 2), device=v.device)
        out = result[..., : v.shape[3]]
        state, zm_state = s.flatten(0, 1).contiguous(), zm.flatten(0, 1).contiguous()
        starts, dens, masses = [], [], []
        with on_device(v.device):
            for (first, last), stretch in _stretches(call, tensors):
                starts += [state, zm_state]
                gate = gates(call.plan, stretch)
                found = states(call.plan, stretch, gate, state, zm_state)
                den, mass = outputs(call.plan, stretch, gate, found, out[:, :, first:last])
                state, zm_state = found.end, found.zm_end
                dens.append(den)
                masses.append(mass)
        den, mass = torch.cat(dens, dim=-1).view(v.shape[:3]), torch.cat(masses, dim=-1).view(v.shape[:3])
        watch = current_watch()
        if watch is not None and call.plan.policy.kind not in ("mass", "one"):
            watch.count(den, call.plan.policy.guard(den, mass))
        if call.undivided:
            result[..., -2], result[..., -1] = den, mass
        ctx.call, ctx.num_inputs = call, len(tensors)
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(*tensors, *(() if call.undivided else (result, den, mass)), *starts)
        return result, state.view_as(s), zm_state.view_as(zm)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        call: _Call = ctx.call
        saved = ctx.saved_tensors
        tensors, needs = saved[: ctx.num_inputs], ctx.needs_input_grad[1:]
        # Autograd turns gradients on inside backward if, and only if, this pass is to be differentiated in its turn.
        if torch.is_grad_enabled():
            replay = attention_again(call.differentiable, call.feature_map, call.plan.policy, call.documents)
            return (None, *again(replay, tensors, needs, grads))
        with on_device(grads[0].device):
            return (None, *_gradients(call, tensors, saved[ctx.num_inputs :], needs, grads))


def _gradients(
    call: _Call, tensors: _Optional, kept: _Tensors, needs: tuple[bool, ...], grads: _Tensors
) -> list[torch.Tensor | None]:
    """The gradients of all inputs, stretch by stretch from the last to the first."""
    s, zm, *parameters = tensors[5:]
    assert s is not None and zm is not None
    results, starts = ((), kept) if call.undivided else (kept[:3], kept[3:])
    grad_result = grads[0] if grads[0].stride(-1) == 1 else grads[0].contiguous()
    grad_out = grad_result[..., :-2] if call.undivided else grad_result
    grad_s, grad_zm = (g.flatten(0, 1).contiguous() for g in grads[1:])
    totals = [
        torch.empty_like(t) if need and t is not None else None for t, need in zip(tensors[:5], needs[:5], strict=True)
    ]
    grad_w = None
    with_map = bool(parameters) and needs[7]
    for number, ((first, last), stretch) in reversed(list(enumerate(_stretches(call, tensors)))):
        gate = gates(call.plan, stretch)
        found = states(call.plan, stretch, gate, starts[2 * number], starts[2 * number + 1])
        if call.undivided:
            rows = given_rows(call.plan, stretch, *grad_result[:, :, first:last, -2:].unbind(-1))
        else:
            out, den, mass = (t[:, :, first:last] for t in results)
            rows = policy_rows(call.plan, stretch, (out, den, mass), grad_out[:, :, first:last])
        ends = (grad_out[:, :, first:last], grad_s, grad_zm)
        part = stretch_gradients(call.plan, stretch, gate, found, rows, ends, with_map=with_map)
        grad_s, grad_zm = part.s, part.zm
        for total, grad in zip(totals, (part.q, part.k, part.v, part.log_gate, part.key_scale), strict=True):
            if total is not None and grad is not None:
                total[:, :, first:last] = grad
        grad_w = part.w if grad_w is None or part.w is None else grad_w + part.w
    of_map = [None if p is None or grad_w is None else grad_w.to(p.dtype) for p in parameters]
    return [*totals, grad_s.view(s.shape), grad_zm.view(zm.shape), *of_map]


def _stretches(call: _Call, tensors: _Optional) -> list[tuple[tuple[int, int], Stretch]]:
    """The token ranges whose states exist at once, and what the kernels are given of each."""
    q, k, v, log_gate, key_scale, s, _, *parameters = tensors
    assert q is not None and k is not None and v is not None and s is not None
    plan, tokens = call.plan, v.shape[2]
    chunk_bytes = 8 * max(1, s.numel())
    step = plan.tiles.chunk * max(1, STATE_BYTES // chunk_bytes)
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
    weights = parameters[0].float().contiguous() if parameters and parameters[0] is not None else s
    numbers = document_numbers(call.documents, tokens, v.device) if call.documents else None
    found = []
    for first in range(0, tokens, step):
        last = min(first + step, tokens)
        of_documents = None
        if numbers is not None:
            before = numbers[first - 1] if first else 0
            of_documents = (numbers[first:last] - before).to(torch.int32)
            filled = -(-(last - first) // plan.tiles.chunk) * plan.tiles.chunk
            of_documents = torch.cat([of_documents, of_documents[-1:].expand(filled - (last - first))])
        gate, scale = (None if t is None else t[:, :, first:last].contiguous() for t in (log_gate, key_scale))
        part_q, part_k, part_v = (t[:, :, first:last] for t in (q, k, v))
        found.append(((first, last), Stretch(part_q, part_k, part_v, weights, gate, scale, of_documents)))
    return found
