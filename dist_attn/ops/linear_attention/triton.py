"""Causal linear attention by GPU kernels: chunk-parallel, features never in memory, sums in float32.

Three passes over a stretch of tokens, each parallel over its chunks: what every chunk leaves behind, a scan of these
over the chunks, outputs. As many tokens form a stretch as have states of at most 1 GiB, so memory above inputs and
outputs is bounded for any length. The backward pass makes the states again.

Importing this module needs triton; `implementation.choose` says whether a call can come here.

Shape letters: B batch, H heads, L tokens, K head size, V values, M features; G = B H, N chunks of T tokens.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch

from dist_attn.ops.denominator import Denominator
from dist_attn.ops.documents import document_numbers
from dist_attn.ops.kernel_operation import Tensors, present
from dist_attn.ops.linear_attention.call import LinearCall
from dist_attn.ops.linear_attention.differentiable import LinearInputs, LinearTensors, LinearTerms, Results, converted
from dist_attn.ops.linear_attention.triton_backward import policy_rows, stretch_gradients, undivided_rows
from dist_attn.ops.linear_attention.triton_forward import (
    Attended,
    KernelPlan,
    StateSums,
    Stretch,
    blocks,
    gates,
    key_states,
    map_operand,
    on_device,
    outputs,
    rowwise,
    tile_dtype,
)
from dist_attn.ops.linear_attention.triton_tiles import Tiles, tiles_for
from dist_attn.ops.state import LinearState

STATE_BYTES = 2**30


def triton_linear_attention(
    call: LinearCall, *, undivided: bool = False, tiles: Tiles | None = None
) -> tuple[torch.Tensor, LinearState]:
    """`linear_attention` of a causal call with as many queries as keys; `undivided`, as `local_sums`.

    Shapes: q, k [B, H, L, K], v [B, H, L, V], gates [B, H, L] -> o [B, H, L, V] in v's dtype, or float32
        [B, H, L, V + 2] of numerators, denominators and masses; the float32 state after.
    """
    q, v = call.q_BHLK, call.v_BHSV
    policy = Denominator("one") if undivided else call.denominator
    plan = KernelPlan.of(q.shape[3], v.shape[3], call.feature_map, policy, tiles or tiles_for(q, v, call.feature_map))
    # Once: both passes read them so.
    gate, scale = (None if t is None else t.contiguous() for t in (call.log_gate_BHS, call.key_scale_BHS))
    call = call.with_sequence(*call.qkv, gate, scale)
    attention = _CausalKernels.of(call, undivided=undivided, plan=plan)
    return attention.attend(call, call.state_before(plan.features))


class _Part(NamedTuple):
    """A stretch, and the range of tokens that it covers."""

    tokens: slice
    stretch: Stretch


@dataclass(frozen=True, kw_only=True)
class _CausalKernels(LinearTerms):
    plan: KernelPlan

    def forward(self, x: LinearTensors, *, keep: bool) -> tuple[Tensors, Tensors]:
        v, s, zm = present(x.v), present(x.s), present(x.zm)
        values = v.shape[3]
        width, dtype = (values + 2, torch.float32) if self.undivided else (values, v.dtype)
        result = torch.empty((*v.shape[:3], width), dtype=dtype, device=v.device)
        state = StateSums(s.flatten(0, 1).contiguous(), zm.flatten(0, 1).contiguous())
        weights = self._weights(x)
        starts, divisors = list[torch.Tensor](), list[tuple[torch.Tensor, torch.Tensor]]()
        with on_device(v.device):
            for tokens, stretch in self._stretches(x, weights):
                starts += state
                gate = gates(stretch)
                scanned = key_states(stretch, gate, state)
                attended = outputs(stretch, gate, scanned.before, result[:, :, tokens, :values])
                divisors.append((attended.den, attended.mass))
                state = scanned.end
        den, mass = (parts[0] if len(parts) == 1 else torch.cat(parts, dim=2) for parts in zip(*divisors, strict=True))
        self.denominator.tell_watch(den, mass)
        if self.undivided:
            result[..., -2], result[..., -1] = den, mass
        results = result, state.s.view_as(s), state.zm.view_as(zm)
        return results, (*((None, None, None) if self.undivided else (result, den, mass)), weights, *starts)

    def backward(self, x: LinearTensors, needs: LinearTensors, grads: Tensors, kept: Tensors) -> LinearTensors:
        """The gradients of all inputs, stretch by stretch from the last to the first."""
        s, zm, results = present(x.s), present(x.zm), Results.of(grads)
        with_map = x.w is not None and bool(needs.w)
        grad_result = rowwise(present(results.out))
        grad_out = grad_result[..., : present(x.v).shape[3]]
        out, den, mass, weights, *starts = kept
        end = StateSums(*(g.flatten(0, 1).contiguous() for g in (results.s, results.zm)))
        along_tokens = x._replace(s=None, zm=None, w=None)
        totals = LinearInputs(
            *(
                None if t is None or not n else rowwise(torch.empty_like(t))
                for t, n in zip(along_tokens, needs, strict=True)
            )
        )
        grad_w = None
        befores = [StateSums(*map(present, pair)) for pair in zip(starts[::2], starts[1::2], strict=True)]
        with on_device(grad_out.device):
            stretches = self._stretches(x, present(weights))
            for (tokens, stretch), start in reversed(list(zip(stretches, befores, strict=True))):
                of_out = grad_out[:, :, tokens]
                if out is None:
                    rows = undivided_rows(stretch, *grad_result[:, :, tokens, -2:].unbind(-1))
                else:
                    attended = Attended(*(present(t)[:, :, tokens] for t in (out, den, mass)))
                    rows = policy_rows(stretch, attended, of_out)
                own = stretch.q, stretch.k, stretch.v
                into = [
                    torch.empty_like(t) if total is None else total[:, :, tokens]
                    for t, total in zip(own, (totals.q, totals.k, totals.v), strict=True)
                ]
                part = stretch_gradients(stretch, start, rows, of_out, end, into, with_map=with_map)
                end = StateSums(present(part.s), present(part.zm))
                for total, grad in ((totals.log_gate, part.log_gate), (totals.key_scale, part.key_scale)):
                    if total is not None and grad is not None:
                        total[:, :, tokens] = grad
                grad_w = part.w if grad_w is None or part.w is None else grad_w + part.w
        return totals._replace(s=end.s.view(s.shape), zm=end.zm.view(zm.shape), w=converted(grad_w, x.w))

    def _weights(self, x: LinearTensors) -> torch.Tensor:
        """The map's tensor as kernels read it, or anything where it has none."""
        return present(x.s) if x.w is None else map_operand(x.w, present(x.v).dtype)

    def _stretches(self, x: LinearTensors, weights: torch.Tensor) -> list[_Part]:
        """The token ranges whose states exist at once, and what the kernels get of each."""
        q, k, v = (rowwise(present(t)) for t in (x.q, x.k, x.v))
        s, tokens, chunk = present(x.s), v.shape[2], self.plan.tiles.chunk
        step = chunk * max(1, STATE_BYTES // (tile_dtype(v.dtype).itemsize * max(1, s.numel())))
        numbers = document_numbers(self.documents, tokens, v.device) if self.documents else None
        parts = []
        for first, last in pairwise([*range(0, tokens, step), tokens]):
            part, of_documents = slice(first, last), None
            if numbers is not None:
                before = numbers[first - 1] if first else 0
                of_documents = (numbers[part] - before).to(torch.int32)
                behind = blocks(last - first, chunk) * chunk - (last - first)
                of_documents = torch.cat([of_documents, of_documents[-1:].expand(behind)])
            gate, scale = (None if t is None else t[:, :, part].contiguous() for t in (x.log_gate, x.key_scale))
            of_q, of_k, of_v = (t[:, :, part] for t in (q, k, v))
            parts.append(_Part(part, Stretch(self.plan, of_q, of_k, of_v, weights, gate, scale, of_documents)))
        return parts
