"""The passes of the C kernels over whole tensors, forward and backward: room for results, one call each.

Tensors of an attention are (q, k, v, log gate, key scale, S, z beside the mass, the map's); those of a read are (q, log
gate, sums, S, z beside the mass, the map's). What is not there is None.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from dist_attn.ops.denominator import Denominator
from dist_attn.ops.feature_map import FeatureMap
from dist_attn.ops.large_pages import on_large_pages
from dist_attn.ops.linear_attention.differentiable import Replay
from dist_attn.ops.linear_attention.joined import Rooms
from dist_attn.ops.linear_attention.native_call import Call, Chunks, kernels, new_call, view
from dist_attn.ops.watch import current_watch

__all__ = ["Passed", "Work", "adjoint_read", "attend", "attend_backward", "read", "read_backward"]

_Tensors = tuple[torch.Tensor, ...]
_Optional = Sequence[torch.Tensor | None]


@dataclass(frozen=True)
class Work:
    """What a call is about beside its tensors."""

    feature_map: FeatureMap | None
    policy: Denominator
    documents: tuple[int, ...]
    undivided: bool
    rooms: Rooms | None  # where outputs and gradients are written
    replay: Replay  # the same of tensors in operations that autograd knows

    def for_the_way_back(self) -> "Work":
        """Without room for outputs: a graph that held its own output would never be freed."""
        return self if self.rooms is None else replace(self, rooms=self.rooms._replace(out=None))


class Passed(NamedTuple):
    """What a forward pass leaves: outputs (None of no queries), the state's sums, and states for the way back.

    den_mass: denominators and masses [2, B, H, L], where somebody asked for them.
    """

    out: torch.Tensor | None
    s: torch.Tensor
    zm: torch.Tensor
    kept: torch.Tensor | None
    den_mass: torch.Tensor | None


def attend(work: Work, tensors: _Optional, *, keep: bool, denominators: bool = False) -> Passed:
    """The forward pass; with `keep`, what `attend_backward` begins with is kept, at most 16 states of each head."""
    v, s, zm = tensors[2], tensors[5], tensors[6]
    assert v is not None and s is not None and zm is not None
    call, _alive = _attention_call(work, tensors)
    s_after, zm_after = torch.empty(s.shape), torch.empty(zm.shape)
    call.s_after, call.zm_after = s_after.data_ptr(), zm_after.data_ptr()
    out = den_mass = kept = None
    if tensors[0] is not None:
        out = _given(work)
        if work.undivided:
            out = on_large_pages(torch.empty((*v.shape[:3], v.shape[3] + 2)))
        elif out is None:
            out = _room_like(v)
        call.out = view(out)
        den_mass = _room_for_denominators(call, work, denominators)
    if keep:
        saved = (call.num_chunks - 1) // call.save_every
        kept = torch.empty(call.batch * call.heads, saved, kernels().dist_attn_state_floats(ctypes.byref(call)))
        call.kept = kept.data_ptr()
    _run(kernels().dist_attn_attend, call, backward=False)
    _tell(work, den_mass)
    return Passed(out, s_after, zm_after, kept, den_mass)


def attend_backward(
    work: Work,
    tensors: _Optional,
    needs: Sequence[bool],
    out: torch.Tensor | None,
    kept: torch.Tensor | None,
    grads: tuple[torch.Tensor | None, torch.Tensor, torch.Tensor],
) -> list[torch.Tensor | None]:
    """The gradients of `tensors` from those of the outputs, S and z beside the mass.

    `out` and `kept` are what the forward pass gave; keys without queries and gates need neither.
    """
    call, alive = _attention_call(work, tensors)
    if kept is not None:
        call.kept = _pointer(kept, alive)
    if out is not None:
        call.out = _view(out, alive)
    grad_out, grad_s, grad_zm = grads
    if grad_out is not None:
        call.grad_out = _view(grad_out, alive)
    call.grad_s_after, call.grad_zm_after = (_pointer(t.contiguous(), alive) for t in (grad_s, grad_zm))
    found = [_room_like(t) if need and t is not None else None for t, need in zip(tensors, needs, strict=True)]
    for number, room in enumerate(() if work.rooms is None else work.rooms.grads):
        if found[number] is not None:
            found[number] = room()
    q, k, v, gate, scale, _, _, *of_map = found
    for name, grad in (("grad_q", q), ("grad_k", k), ("grad_v", v)):
        if grad is not None:
            setattr(call, name, view(grad))
    gate, scale = (None if t is None else torch.empty(t.shape) for t in (gate, scale))
    call.grad_log_gate, call.grad_key_scale = (None if t is None else t.data_ptr() for t in (gate, scale))
    s, zm = _room_for_state(call, tensors[5], tensors[6])
    grad_w = _room_for_map(call, of_map)
    _run(kernels().dist_attn_attend_backward, call, backward=True)
    gates = [_as(t, like) for t, like in zip((gate, scale), tensors[3:5], strict=True)]
    return [q, k, v, *gates, s, zm, *_map_gradients(grad_w, of_map)]


def read(work: Work, tensors: _Optional, out_dtype: torch.dtype) -> torch.Tensor:
    """Outputs of queries that all read one state."""
    q, s = tensors[0], tensors[3]
    assert q is not None and s is not None
    call, _alive = _read_call(work, tensors)
    out = _given(work)
    if out is None:
        out = on_large_pages(torch.empty((*q.shape[:3], s.shape[3]), dtype=out_dtype))
    call.out = view(out)
    den_mass = _room_for_denominators(call, work, False)
    _run(kernels().dist_attn_read, call, backward=False)
    _tell(work, den_mass)
    return out


def read_backward(
    work: Work, tensors: _Optional, needs: Sequence[bool], out: torch.Tensor, grad_out: torch.Tensor
) -> list[torch.Tensor | None]:
    """The gradients of `tensors` from that of the outputs."""
    call, alive = _read_call(work, tensors)
    call.out, call.grad_out = view(out), _view(grad_out, alive)
    q, gate, sums, _, _, *of_map = (
        _room_like(t) if need and t is not None else None for t, need in zip(tensors, needs, strict=True)
    )
    if q is not None:
        call.grad_q = view(q)
    if sums is not None:
        call.grad_sums = view(sums)
    gate = None if gate is None else torch.empty(gate.shape)
    call.grad_log_gate = None if gate is None else gate.data_ptr()
    s, zm = _room_for_state(call, tensors[3], tensors[4])
    grad_w = _room_for_map(call, of_map)
    _run(kernels().dist_attn_read_backward, call, backward=True)
    return [q, _as(gate, tensors[1]), sums, s, zm, *_map_gradients(grad_w, of_map)]


def adjoint_read(
    work: Work, tensors: _Optional, out: torch.Tensor, den_mass: torch.Tensor, grad_out: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of the state before an attention without gates, S and z beside the mass: one walk over the queries.

    `den_mass` are the denominators and masses that the forward pass found.
    """
    call, alive = _attention_call(work, tensors)
    call.out, call.grad_out = view(out), _view(grad_out, alive)
    den, mass = den_mass
    call.den, call.mass = _pointer(den, alive), _pointer(mass, alive)
    s, zm = _room_for_state(call, tensors[5], tensors[6])
    _run(kernels().dist_attn_adjoint_read, call, backward=True)
    return s, zm


def _attention_call(work: Work, tensors: _Optional) -> tuple[Call, list[torch.Tensor]]:
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


def _read_call(work: Work, tensors: _Optional) -> tuple[Call, list[torch.Tensor]]:
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
    work: Work,
    x: torch.Tensor,
    values: int,
    parameters: Sequence[torch.Tensor | None],
    s: torch.Tensor,
    zm: torch.Tensor,
    documents: tuple[int, ...],
) -> tuple[Call, list[torch.Tensor]]:
    chunks = Chunks.of(x.shape[2], documents)
    w = None if not parameters or parameters[0] is None else parameters[0].detach().float().contiguous()
    alive = [t for t in (chunks.starts, chunks.fresh, w) if t is not None]
    call = new_call(x.shape, values, feature_map=work.feature_map, policy=work.policy, chunks=chunks, w_HDK=w)
    call.s, call.zm = (_pointer(t, alive) for t in _contiguous(s, zm))
    return call, alive


def _given(work: Work) -> torch.Tensor | None:
    return None if work.rooms is None else work.rooms.out


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
    return on_large_pages(room if room.stride(-1) == 1 or x.dim() != 4 else torch.empty(x.shape, dtype=x.dtype))


def _run(kernel: Callable[[Any], None], call: Call, *, backward: bool) -> None:
    library = kernels()
    count = library.dist_attn_backward_floats if backward else library.dist_attn_forward_floats
    call.memory_floats = count(ctypes.byref(call))
    # No more threads than there are heads to work on, and no memory for more.
    call.threads = max(1, min(call.threads, call.batch * call.heads))
    memory = torch.empty(call.threads, call.memory_floats)
    call.memory = memory.data_ptr()
    kernel(ctypes.byref(call))


def _room_for_denominators(call: Call, work: Work, wanted: bool) -> torch.Tensor | None:
    """Room for denominators and masses, where they are wanted or somebody wants to hear of them."""
    if not wanted and (current_watch() is None or work.policy.kind in ("mass", "one")):
        return None
    room = torch.empty(2, call.batch, call.heads, call.tokens)
    call.den, call.mass = room[0].data_ptr(), room[1].data_ptr()
    return room


def _tell(work: Work, den_mass: torch.Tensor | None) -> None:
    watch = current_watch()
    if den_mass is not None and watch is not None and work.policy.kind not in ("mass", "one"):
        den, mass = den_mass
        watch.count(den, work.policy.guard(den, mass))


def _room_for_state(call: Call, s: torch.Tensor | None, zm: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    assert s is not None and zm is not None
    grad_s, grad_zm = torch.empty(s.shape), torch.empty(zm.shape)
    call.grad_s, call.grad_zm = grad_s.data_ptr(), grad_zm.data_ptr()
    return grad_s, grad_zm


def _as(x: torch.Tensor | None, like: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None or like is None else x.to(like.dtype)


def _room_for_map(call: Call, of_map: list[torch.Tensor | None]) -> torch.Tensor | None:
    if not of_map or of_map[0] is None:
        return None
    grad_w = torch.empty(call.batch, call.heads, call.projections, call.size)
    call.grad_w = grad_w.data_ptr()
    return grad_w


def _map_gradients(grad_w: torch.Tensor | None, of_map: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    return [None if t is None or grad_w is None else grad_w.sum(0).to(t.dtype) for t in of_map]
