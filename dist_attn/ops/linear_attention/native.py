"""Linear attention by C kernels for processors: features made where they are used, chunk by chunk, heads in parallel.

A chunk's features, scores and states never leave the cache of the core that works on a head. Sums are float32; numbers
below 1e-38 count as 0. Each head is one thread's work from beginning to end, so results do not depend on the number of
threads, nor on what else is in the batch or in the packed row.

`implementation.choose` says whether a call can come here.
"""

from typing import Any

import torch

from dist_attn.errors import ShapeError
from dist_attn.ops.denominator import Denominator
from dist_attn.ops.feature_map import FeatureMap
from dist_attn.ops.linear_attention.differentiable import Replay, again, state_after, sums_of
from dist_attn.ops.linear_attention.joined import Rooms
from dist_attn.ops.linear_attention.native_call import TYPES, num_features
from dist_attn.ops.linear_attention.native_passes import Work, attend, attend_backward, read, read_backward
from dist_attn.ops.state import LinearState

__all__ = ["native_absorb", "native_attention", "native_read"]

_Tensors = tuple[torch.Tensor, ...]


def native_attention(
    q_BHLK: torch.Tensor,
    k_BHLK: torch.Tensor,
    v_BHLV: torch.Tensor,
    log_gate_BHL: torch.Tensor | None,
    key_scale_BHL: torch.Tensor | None,
    *,
    feature_map: FeatureMap | None,
    state: LinearState | None,
    denominator: Denominator,
    documents: tuple[int, ...],
    replay: Replay,
    undivided: bool = False,
    rooms: Rooms | None = None,
) -> tuple[torch.Tensor, LinearState]:
    """`linear_attention` of as many queries as keys, causal; `undivided`, as `local_sums`.

    With `rooms`, that is where outputs, if they are divided, and gradients of q, k and v are written.

    `replay` is the same as a function of (q, k, v, log gate, key scale, S, z beside the mass, the map's tensors), in
    operations that autograd knows: what gradients that are differentiated again go through.

    Shapes: as `linear_attention`, or float32 [B, H, L, V + 2] of numerators, denominators and masses.
    """
    before, zm_BHE, parameters = _begin(k_BHLK, v_BHLV, feature_map, state)
    work = Work(feature_map, denominator, documents, undivided, rooms, replay)
    out, s_BHMV, zm_BHE = _Attend.apply(  # type: ignore[no-untyped-call]
        work, q_BHLK, k_BHLK, v_BHLV, log_gate_BHL, key_scale_BHL, before.s_BHMV, zm_BHE, *parameters
    )
    return out, state_after(before, s_BHMV, zm_BHE, log_gate_BHL, documents)


def native_absorb(
    k_BHLK: torch.Tensor,
    v_BHLV: torch.Tensor,
    log_gate_BHL: torch.Tensor | None,
    key_scale_BHL: torch.Tensor | None,
    *,
    feature_map: FeatureMap | None,
    state: LinearState | None,
    replay: Replay,
) -> LinearState:
    """`absorb_keys`; `replay` is as for `native_attention`, of no queries and with no outputs."""
    before, zm_BHE, parameters = _begin(k_BHLK, v_BHLV, feature_map, state)
    work = Work(feature_map, Denominator("one"), (), False, None, replay)
    s_BHMV, zm_BHE = _Attend.apply(  # type: ignore[no-untyped-call]
        work, None, k_BHLK, v_BHLV, log_gate_BHL, key_scale_BHL, before.s_BHMV, zm_BHE, *parameters
    )
    return state_after(before, s_BHMV, zm_BHE, log_gate_BHL, ())


def native_read(
    q_BHLK: torch.Tensor,
    state: LinearState,
    *,
    feature_map: FeatureMap | None,
    denominator: Denominator,
    out_dtype: torch.dtype,
    replay: Replay,
    log_gate_BHL: torch.Tensor | None = None,
    sums_BHLX: torch.Tensor | None = None,
    rooms: Rooms | None = None,
) -> torch.Tensor:
    """Outputs of queries that all read one state, decayed by the gates so far; with `sums`, as `complete_sums`.

    `replay` is the same as a function of (q, log gate, sums, S, z beside the mass, the map's tensors), in operations
    that autograd knows.
    """
    (batch, heads, tokens, size), values = q_BHLK.shape, state.s_BHMV.shape[3]
    state.check(batch, heads, num_features(feature_map, size), values)
    for name, tensor, needed in (("sums", sums_BHLX, (tokens, values + 2)), ("log_gate", log_gate_BHL, (tokens,))):
        if tensor is not None and tensor.shape != (batch, heads, *needed):
            raise ShapeError(f"{name} is {tuple(tensor.shape)}; needed here is {(batch, heads, *needed)}")
    parameters = () if feature_map is None else feature_map.tensors()
    s_BHMV, zm_BHE = sums_of(state)
    written = out_dtype if out_dtype in TYPES else torch.float32
    work = Work(feature_map, denominator, (), False, rooms if written == out_dtype else None, replay)
    out: torch.Tensor = _Read.apply(  # type: ignore[no-untyped-call]
        work, written, q_BHLK, log_gate_BHL, sums_BHLX, s_BHMV, zm_BHE, *parameters
    )
    return out.to(out_dtype)


def _begin(
    k: torch.Tensor, v: torch.Tensor, feature_map: FeatureMap | None, state: LinearState | None
) -> tuple[LinearState, torch.Tensor, _Tensors]:
    parameters = () if feature_map is None else feature_map.tensors()
    features = num_features(feature_map, k.shape[3])
    if state is None:
        state = LinearState.identity(k.shape[0], k.shape[1], features, v.shape[3])
    state.check(k.shape[0], k.shape[1], features, v.shape[3])
    return state, sums_of(state)[1], parameters


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, work: Work, *tensors: torch.Tensor | None) -> Any:
        passed = attend(work, tensors, keep=any(ctx.needs_input_grad))
        ctx.work, ctx.num_inputs = work.for_the_way_back(), len(tensors)
        if passed.kept is not None:
            ctx.save_for_backward(*tensors, None if work.undivided else passed.out, passed.kept)
        after = passed.s, passed.zm
        return after if passed.out is None else (passed.out, *after)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        work: Work = ctx.work
        *tensors, out, kept = ctx.saved_tensors
        needs = ctx.needs_input_grad[1:]
        # Autograd turns gradients on inside backward if, and only if, this pass is to be differentiated in its turn.
        if torch.is_grad_enabled():
            return (None, *again(work.replay, tuple(tensors), needs, grads))
        grad_out = grads[0] if len(grads) == 3 else None
        return (None, *attend_backward(work, tensors, needs, out, kept, (grad_out, grads[-2], grads[-1])))


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, work: Work, out_dtype: torch.dtype, *tensors: torch.Tensor | None) -> Any:
        out = read(work, tensors, out_dtype)
        ctx.work = work.for_the_way_back()
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(*tensors, out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        work: Work = ctx.work
        *tensors, out = ctx.saved_tensors
        needs = ctx.needs_input_grad[2:]
        if torch.is_grad_enabled():
            return (None, None, *again(work.replay, tuple(tensors), needs, grads))
        return (None, None, *read_backward(work, tensors, needs, out, grads[0]))
