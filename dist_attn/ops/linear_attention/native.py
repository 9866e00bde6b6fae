"""Linear attention by C kernels for processors: features made where they are used, chunk by chunk, heads in parallel.

A chunk's features, scores and states never leave the cache of the core that works on a head. Sums are float32; numbers
below 1e-38 count as 0. Each head is one thread's work from beginning to end, so results do not depend on the number of
threads, nor on what else is in the batch or in the packed row.

`implementation.choose` says whether a call can come here.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from dist_attn.ops.denominator import Denominator
from dist_attn.ops.feature_map import FeatureMap
from dist_attn.ops.linear_attention.differentiable import Replay, again, state_after, sums_of
from dist_attn.ops.linear_attention.native_call import Call, chunk_starts, kernels, new_call, num_features, view
from dist_attn.ops.state import LinearState
from dist_attn.ops.watch import current_watch

__all__ = ["native_absorb", "native_attention", "native_read"]

_Tensors = tuple[torch.Tensor, ...]
_Optional = tuple[torch.Tensor | None, ...]


@dataclass(frozen=True)
class _Work:
    feature_map: FeatureMap | None
    policy: Denominator
    documents: tuple[int, ...]
    undivided: bool
    room: torch.Tensor | None  # where outputs are written
    replay: Replay  # the same of tensors in operations that autograd knows


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
    room: torch.Tensor | None = None,
) -> tuple[torch.Tensor, LinearState]:
    """`linear_attention` of as many queries as keys, causal; `undivided`, as `local_sums`.

    What comes out lies in `room`, where there is some: a part of a longer output.

    `replay` is the same as a function of (q, k, v, log gate, key scale, S, z beside the mass, the map's tensors), in
    operations that autograd knows: what gradients that are differentiated again go through.

    Shapes: as `linear_attention`, or float32 [B, H, L, V + 2] of numerators, denominators and masses.
    """
    before, zm_BHE, parameters = _begin(k_BHLK, v_BHLV, feature_map, state)
    work = _Work(feature_map, denominator, documents, undivided, room, replay)
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
    work = _Work(feature_map, Denominator("one"), (), False, None, replay)
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
    room: torch.Tensor | None = None,
) -> torch.Tensor:
    """Outputs of queries that all read one state, decayed by the gates so far; with `sums`, as `complete_sums`.

    `replay` is the same as a function of (q, log gate, sums, S, z beside the mass, the map's tensors), in operations
    that autograd knows.
    """
    parameters = () if feature_map is None else feature_map.tensors()
    s_BHMV, zm_BHE = sums_of(state)
    work = _Work(feature_map, denominator, (), False, room, replay)
    out: torch.Tensor = _Read.apply(  # type: ignore[no-untyped-call]
        work, out_dtype, q_BHLK, log_gate_BHL, sums_BHLX, s_BHMV, zm_BHE, *parameters
    )
    return out


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
    def forward(ctx: Any, work: _Work, *tensors: torch.Tensor | None) -> Any:
        v, s, zm = tensors[2], tensors[5], tensors[6]
        assert v is not None and s is not None and zm is not None
        call, alive = _attention_call(work, tensors)
        after = torch.empty(s.shape), torch.empty(zm.shape)
        call.s_after, call.zm_after = (t.data_ptr() for t in after)
        out = None
        if tensors[0] is not None:
            out = work.room
            if out is None:
                out = torch.empty((*v.shape[:3], v.shape[3] + 2)) if work.undivided else _room_like(v)
            call.out = view(out)
        watched = _watch_denominators(call, work, alive) if out is not None else None
        kept = None
        if any(ctx.needs_input_grad):
            saved = (call.num_chunks - 1) // call.save_every
            kept = torch.empty(call.batch * call.heads, saved, kernels().dist_attn_state_floats(ctypes.byref(call)))
            call.kept = kept.data_ptr()
        _run(kernels().dist_attn_attend, call)
        _count(watched, work)
        ctx.work, ctx.num_inputs = work, len(tensors)
        if kept is not None:
            ctx.save_for_backward(*tensors, None if work.undivided else out, kept)
        return after if out is None else (out, *after)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        work: _Work = ctx.work
        saved, needs = ctx.saved_tensors, ctx.needs_input_grad[1:]
        tensors = saved[: ctx.num_inputs]
        # Autograd turns gradients on inside backward if, and only if, this pass is to be differentiated in its turn.
        if torch.is_grad_enabled():
            return (None, *again(work.replay, tensors, needs, grads))
        out, kept = saved[ctx.num_inputs :]
        call, alive = _attention_call(work, tensors)
        call.kept = _pointer(kept, alive)
        if out is not None:
            call.out = _view(out, alive)
        if len(grads) == 3:
            call.grad_out = _view(grads[0], alive)
        call.grad_s_after, call.grad_zm_after = (_pointer(t.contiguous(), alive) for t in grads[-2:])
        found = [_room_like(t) if need and t is not None else None for t, need in zip(tensors, needs, strict=True)]
        q, k, v, gate, scale, s, zm, *of_map = found
        for name, grad in (("grad_q", q), ("grad_k", k), ("grad_v", v)):
            if grad is not None:
                setattr(call, name, view(grad))
        gate, scale = (None if t is None else torch.empty(t.shape) for t in (gate, scale))
        call.grad_log_gate, call.grad_key_scale = (None if t is None else t.data_ptr() for t in (gate, scale))
        s, zm = torch.empty(tensors[5].shape), torch.empty(tensors[6].shape)
        call.grad_s, call.grad_zm = s.data_ptr(), zm.data_ptr()
        grad_w = _room_for_map(call, of_map)
        _run(kernels().dist_attn_attend_backward, call)
        gates = [None if t is None else t.to(like.dtype) for t, like in zip((gate, scale), tensors[3:5], strict=True)]
        return (None, q, k, v, *gates, s, zm, *_map_gradients(grad_w, of_map))


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, work: _Work, out_dtype: torch.dtype, *tensors: torch.Tensor | None) -> Any:
        q, s = tensors[0], tensors[3]
        assert q is not None and s is not None
        call, alive = _read_call(work, tensors)
        out = torch.empty((*q.shape[:3], s.shape[3]), dtype=out_dtype) if work.room is None else work.room
        call.out = view(out)
        watched = _watch_denominators(call, work, alive)
        _run(kernels().dist_attn_read, call)
        _count(watched, work)
        ctx.work, ctx.num_inputs = work, len(tensors)
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(*tensors, out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        work: _Work = ctx.work
        *tensors, out = ctx.saved_tensors
        needs = ctx.needs_input_grad[2:]
        if torch.is_grad_enabled():
            return (None, None, *again(work.replay, tuple(tensors), needs, grads))
        call, alive = _read_call(work, tuple(tensors))
        call.out, call.grad_out = view(out), _view(grads[0], alive)
        q, gate, sums, s, zm, *of_map = (
            _room_like(t) if need and t is not None else None for t, need in zip(tensors, needs, strict=True)
        )
        if q is not None:
            call.grad_q = view(q)
        if sums is not None:
            call.grad_sums = view(sums)
        gate = None if gate is None else torch.empty(gate.shape)
        call.grad_log_gate = None if gate is None else gate.data_ptr()
        s, zm = torch.empty(tensors[3].shape), torch.empty(tensors[4].shape)
        call.grad_s, call.grad_zm = s.data_ptr(), zm.data_ptr()
        grad_w = _room_for_map(call, of_map)
        _run(kernels().dist_attn_read_backward, call)
        of_gate = None if gate is None else gate.to(tensors[1].dtype)
        return (None, None, q, of_gate, sums, s, zm, *_map_gradients(grad_w, of_map))


def _attention_call(work: _Work, tensors: _Optional) -> tuple[Call, list[torch.Tensor]]:
    """The call for (q, k, v, log gate, key scale, S, z beside the mass, w), and tensors that have to outlive it."""
    q, k, v, log_gate, key_scale, s, zm, *parameters = tensors
    assert k is not None and v is not None and s is not None and zm is not None
    call, alive = _new_call(work, k, v.shape[3], parameters, s, zm, work.documents)
    call.k, call.v = _view(k, alive), _view(v, alive)
    if q is not None:
        call.q = _view(q, alive)
    if log_gate is not None:
        call.log_gate = _view(_of_gates(log_gate), alive)
    if key_scale is not None:
        call.key_scale = _view(_of_gates(key_scale), alive)
    call.undivided = work.undivided
    return call, alive


def _read_call(work: _Work, tensors: _Optional) -> tuple[Call, list[torch.Tensor]]:
    """The call for (q, log gate, sums, S, z beside the mass, w)."""
    q, log_gate, sums, s, zm, *parameters = tensors
    assert q is not None and s is not None and zm is not None
    call, alive = _new_call(work, q, s.shape[3], parameters, s, zm, ())
    call.q = _view(q, alive)
    if log_gate is not None:
        call.log_gate = _view(_of_gates(log_gate), alive)
    if sums is not None:
        call.sums = _view(sums, alive)
    return call, alive


def _new_call(
    work: _Work,
    x: torch.Tensor,
    values: int,
    parameters: list[torch.Tensor | None],
    s: torch.Tensor,
    zm: torch.Tensor,
    documents: tuple[int, ...],
) -> tuple[Call, list[torch.Tensor]]:
    chunks, fresh = chunk_starts(x.shape[2], documents)
    w = None if not parameters or parameters[0] is None else parameters[0].detach().float().contiguous()
    alive = [chunks, fresh, *(() if w is None else (w,))]
    call = new_call(
        x.shape, values, feature_map=work.feature_map, policy=work.policy, chunks=chunks, fresh=fresh, w_HDK=w
    )
    call.s, call.zm = (_pointer(t, alive) for t in _contiguous(s, zm))
    return call, alive


def _contiguous(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [t.detach().contiguous() for t in tensors]


def _of_gates(x: torch.Tensor) -> torch.Tensor:
    """Gates in one of the types that kernels read."""
    return x if x.dtype in (torch.float32, torch.bfloat16) else x.float()


def _pointer(x: torch.Tensor, alive: list[torch.Tensor]) -> int:
    alive.append(x)
    return x.data_ptr()


def _view(x: torch.Tensor, alive: list[torch.Tensor]) -> Any:
    x = x.detach()
    if x.dim() == 4 and x.stride(-1) != 1:
        x = x.contiguous()
    alive.append(x)
    return view(x)


def _room_like(x: torch.Tensor) -> torch.Tensor:
    """Memory for what has x's type and sizes, laid out as x is where its rows lie in one piece."""
    room = torch.empty_like(x)
    return room if room.stride(-1) == 1 or x.dim() != 4 else torch.empty(x.shape, dtype=x.dtype)


def _run(kernel: Callable[[Any], int], call: Call) -> None:
    if kernel(ctypes.byref(call)):
        raise MemoryError("there is not enough memory for the kernels' working space, about a megabyte for each thread")


def _watch_denominators(call: Call, work: _Work, alive: list[torch.Tensor]) -> _Tensors | None:
    """Room for denominators and masses [B, H, L], where somebody wants to hear of them."""
    if current_watch() is None or work.policy.kind in ("mass", "one"):
        return None
    den, mass = (torch.empty(call.batch, call.heads, call.tokens) for _ in range(2))
    call.den, call.mass = _pointer(den, alive), _pointer(mass, alive)
    return den, mass


def _count(watched: _Tensors | None, work: _Work) -> None:
    watch = current_watch()
    if watched is not None and watch is not None and not work.undivided:
        den, mass = watched
        watch.count(den, work.policy.guard(den, mass))


def _room_for_map(call: Call, of_map: list[torch.Tensor | None]) -> torch.Tensor | None:
    if not of_map or of_map[0] is None:
        return None
    grad_w = torch.empty(call.batch, call.heads, call.projections, call.size)
    call.grad_w = grad_w.data_ptr()
    return grad_w


def _map_gradients(grad_w: torch.Tensor | None, of_map: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    return [None if t is None or grad_w is None else grad_w.sum(0).to(t.dtype) for t in of_map]
