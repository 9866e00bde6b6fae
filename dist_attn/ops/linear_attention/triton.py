"""Causal linear attention by GPU kernels: chunk-parallel, features never in memory, sums in float32.

Three passes over a stretch of tokens, each parallel over its chunks: what every chunk leaves behind, a scan of these
over the chunks, outputs. As many tokens form a stretch as have states of at most 1 GiB, so memory above inputs and
outputs is bounded for any length. The backward pass makes the states again.

Importing this module needs triton; `implementation.choose` says whether a call can come here.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch

from dist_attn.ops.denominator import Denominator
from dist_attn.ops.documents import document_numbers
from dist_attn.ops.linear_attention.call import LinearCall
from dist_attn.ops.linear_attention.differentiable import (
    Inputs,
    Results,
    Tensors,
    Terms,
    gradients_of_replay,
    inputs_of,
    present,
    state_after,
)
from dist_attn.ops.linear_attention.triton_backward import given_rows, policy_rows, stretch_gradients
from dist_attn.ops.linear_attention.triton_forward import Plan, Stretch, gates, make_plan, on_device, outputs, states
from dist_attn.ops.linear_attention.triton_tiles import Tiles, tiles_for
from dist_attn.ops.state import LinearState
from dist_attn.ops.watch import current_watch

STATE_BYTES = 2**30


class _Launch(NamedTuple):
    plan: Plan
    terms: Terms


class _Kept(NamedTuple):
    """What a forward pass leaves for the backward pass: outputs where they were divided, states before stretches."""

    divided: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None  # outputs, denominators and masses
    starts: list[tuple[torch.Tensor, torch.Tensor]]


def triton_linear_attention(
    call: LinearCall, *, undivided: bool = False, tiles: Tiles | None = None
) -> tuple[torch.Tensor, LinearState]:
    """`linear_attention` of as many queries as keys, causal; `undivided`, as `local_sums`.

    Shapes: q, k [B, H, L, K], v [B, H, L, V], gates [B, H, L] -> o [B, H, L, V] in v's dtype, or float32
        [B, H, L, V + 2] of numerators, denominators and masses; the float32 state after.
    """
    q, _, v, _, _ = call.sequence
    batch, heads, _, size = q.shape
    terms = Terms(call.feature_map, call.denominator, call.documents)
    if undivided:
        terms = replace(terms, denominator=Denominator("one"), undivided=True)
    tiles = tiles or tiles_for(q, v, call.feature_map)
    plan = make_plan(size, v.shape[3], call.feature_map, terms.denominator, tiles)
    state = call.state
    if state is None:
        state = LinearState.identity(batch, heads, plan.features, v.shape[3], device=v.device)
    state.check(batch, heads, plan.features, v.shape[3])
    results = Results(*_Kernels.apply(_Launch(plan, terms), *inputs_of(call, state)))  # type: ignore[no-untyped-call]
    return present(results.out), state_after(state, results, call)


class _Kernels(torch.autograd.Function):
    """Tensors of an attention -> outputs, S and z beside the mass."""

    @staticmethod
    def forward(ctx: Any, launch: _Launch, *tensors: torch.Tensor | None) -> Any:
        plan, terms = launch
        inputs: Tensors = Inputs(*tensors)
        v, s, zm = present(inputs.v), present(inputs.s), present(inputs.zm)
        result = torch.empty(v.shape, dtype=v.dtype, device=v.device)
        if terms.undivided:
            result = torch.empty((*v.shape[:3], v.shape[3] + 2), device=v.device)
        out = result[..., : v.shape[3]]
        state, zm_state = s.flatten(0, 1).contiguous(), zm.flatten(0, 1).contiguous()
        starts, dens, masses = [], [], []
        with on_device(v.device):
            for (first, last), stretch in _stretches(launch, inputs):
                starts += [state, zm_state]
                gate = gates(plan, stretch)
                chunks = states(plan, stretch, gate, state, zm_state)
                den, mass = outputs(plan, stretch, gate, chunks, out[:, :, first:last])
                state, zm_state = chunks.end, chunks.zm_end
                dens.append(den)
                masses.append(mass)
        den, mass = torch.cat(dens, dim=-1).view(v.shape[:3]), torch.cat(masses, dim=-1).view(v.shape[:3])
        watch = current_watch()
        if watch is not None and plan.policy.kind not in ("mass", "one"):
            watch.count(den, plan.policy.guard(den, mass))
        if terms.undivided:
            result[..., -2], result[..., -1] = den, mass
        ctx.launch = launch
        if any(ctx.needs_input_grad):
            divided = (None, None, None) if terms.undivided else (result, den, mass)
            ctx.save_for_backward(*inputs, *divided, *starts)
        return result, state.view_as(s), zm_state.view_as(zm)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        launch: _Launch = ctx.launch
        q, k, v, log_gate, key_scale, s, zm, w, out, den, mass, *starts = ctx.saved_tensors
        inputs: Tensors = Inputs(q, k, v, log_gate, key_scale, s, zm, w)
        _, *asked = ctx.needs_input_grad
        # Autograd turns gradients on inside backward if, and only if, this pass is to be differentiated in its turn.
        if torch.is_grad_enabled():
            return (None, *gradients_of_replay(launch.terms.replay, inputs, asked, grads))
        pairs = list(zip(starts[::2], starts[1::2], strict=True))
        kept = _Kept(None if out is None else (out, den, mass), pairs)
        with on_device(v.device):
            return (None, *_gradients(launch, inputs, kept, Inputs(*asked), Results(*grads)))


def _gradients(launch: _Launch, x: Tensors, kept: _Kept, needs: Inputs[bool], grads: Results) -> Tensors:
    """The gradients of all inputs, stretch by stretch from the last to the first."""
    plan, s, zm = launch.plan, present(x.s), present(x.zm)
    grad_result = present(grads.out)
    grad_result = grad_result if grad_result.stride(-1) == 1 else grad_result.contiguous()
    grad_out = grad_result[..., :-2] if kept.divided is None else grad_result
    grad_s, grad_zm = (g.flatten(0, 1).contiguous() for g in (grads.s, grads.zm))
    along_tokens = x._replace(s=None, zm=None, w=None)
    totals = Inputs(
        *(None if t is None or not n else torch.empty_like(t) for t, n in zip(along_tokens, needs, strict=True))
    )
    grad_w = None
    stretches = list(zip(_stretches(launch, x), kept.starts, strict=True))
    for ((first, last), stretch), (start, zm_start) in reversed(stretches):
        gate = gates(plan, stretch)
        chunks = states(plan, stretch, gate, start, zm_start)
        if kept.divided is None:
            rows = given_rows(plan, stretch, *grad_result[:, :, first:last, -2:].unbind(-1))
        else:
            out, den, mass = (t[:, :, first:last] for t in kept.divided)
            rows = policy_rows(plan, stretch, (out, den, mass), grad_out[:, :, first:last])
        ends = (grad_out[:, :, first:last], grad_s, grad_zm)
        part = stretch_gradients(plan, stretch, gate, chunks, rows, ends, with_map=x.w is not None and needs.w)
        grad_s, grad_zm = present(part.s), present(part.zm)
        for total, grad in zip(totals, part._replace(s=None, zm=None, w=None), strict=True):
            if total is not None and grad is not None:
                total[:, :, first:last] = grad
        grad_w = part.w if grad_w is None or part.w is None else grad_w + part.w
    of_w = None if x.w is None or grad_w is None else grad_w.to(x.w.dtype)
    return totals._replace(s=grad_s.view(s.shape), zm=grad_zm.view(zm.shape), w=of_w)


def _stretches(launch: _Launch, x: Tensors) -> list[tuple[tuple[int, int], Stretch]]:
    """The token ranges whose states exist at once, and what the kernels are given of each."""
    plan, documents = launch.plan, launch.terms.documents
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in map(present, (x.q, x.k, x.v)))
    s, tokens = present(x.s), v.shape[2]
    chunk_bytes = 8 * max(1, s.numel())
    step = plan.tiles.chunk * max(1, STATE_BYTES // chunk_bytes)
    weights = s if x.w is None else x.w.float().contiguous()
    numbers = document_numbers(documents, tokens, v.device) if documents else None
    stretches = []
    for first in range(0, tokens, step):
        last = min(first + step, tokens)
        of_documents = None
        if numbers is not None:
            before = numbers[first - 1] if first else 0
            of_documents = (numbers[first:last] - before).to(torch.int32)
            filled = -(-(last - first) // plan.tiles.chunk) * plan.tiles.chunk
            of_documents = torch.cat([of_documents, of_documents[-1:].expand(filled - (last - first))])
        gate, scale = (None if t is None else t[:, :, first:last].contiguous() for t in (x.log_gate, x.key_scale))
        part_q, part_k, part_v = (t[:, :, first:last] for t in (q, k, v))
        stretches.append(((first, last), Stretch(part_q, part_k, part_v, weights, gate, scale, of_documents)))
    return stretches
