"""The passes of the C kernels over whole tensors, forward and backward: memory for results, one call each."""

import ctypes
from collections.abc import Callable
from typing import Any, Generic, NamedTuple

import torch

from dist_attn.ops.linear_attention.call import OutputBuffers
from dist_attn.ops.linear_attention.differentiable import Each, Inputs, Results, Tensors, Terms, present
from dist_attn.ops.linear_attention.native_call import Call, Chunks, View, kernels, new_call, view
from dist_attn.ops.processor import on_large_pages
from dist_attn.ops.watch import current_watch


class ReadInputs(NamedTuple, Generic[Each]):
    """A value for each tensor of a read, as `Inputs`; `sums` are what the read-out is added to before it is divided."""

    q: Each
    log_gate: Each
    sums: Each
    s: Each
    zm: Each
    w: Each


ReadTensors = ReadInputs[torch.Tensor | None]


class Passed(NamedTuple):
    """What a forward pass leaves: outputs (None of no queries), the state's sums, and states for the backward pass.

    den_mass: denominators and masses [2, B, H, L], where they were asked for.
    """

    results: Results
    kept: torch.Tensor | None
    den_mass: torch.Tensor | None


def attend(terms: Terms, x: Tensors, *, keep: bool, denominators: bool = False) -> Passed:
    """The forward pass; with `keep`, what `attend_backward` begins with is kept, at most 16 states of each head."""
    v, s, zm = present(x.v), present(x.s), present(x.zm)
    call, _alive = _attention_call(terms, x)
    s_after, zm_after = torch.empty(s.shape), torch.empty(zm.shape)
    call.s_after, call.zm_after = s_after.data_ptr(), zm_after.data_ptr()
    out = den_mass = kept = None
    if x.q is not None:
        out = None if terms.buffers is None else terms.buffers.out
        if terms.undivided:
            out = on_large_pages(torch.empty((*v.shape[:3], v.shape[3] + 2)))
        elif out is None:
            out = _empty_like(v)
        call.out = view(out)
        den_mass = _denominators(call, terms, denominators)
    if keep:
        saved = (call.num_chunks - 1) // call.save_every
        kept = torch.empty(call.batch * call.heads, saved, kernels().dist_attn_state_floats(ctypes.byref(call)))
        call.kept = kept.data_ptr()
    _run(kernels().dist_attn_attend, call, backward=False)
    _count(terms, den_mass)
    return Passed(Results(out, s_after, zm_after), kept, den_mass)


def attend_backward(
    terms: Terms,
    x: Tensors,
    needs: Inputs[bool],
    grads: Results,
    *,
    out: torch.Tensor | None,
    kept: torch.Tensor | None,
) -> Tensors:
    """The gradients of the tensors from those of the results.

    `out` and `kept` are what the forward pass gave; keys without queries and gates need neither.
    """
    call, alive = _attention_call(terms, x)
    if kept is not None:
        call.kept = _pointer(kept, alive)
    call.out, call.grad_out = _view(out, alive), _view(grads.out, alive)
    call.grad_s_after, call.grad_zm_after = (_pointer(t.contiguous(), alive) for t in (grads.s, grads.zm))
    buffers = OutputBuffers(None) if terms.buffers is None else terms.buffers
    q = _gradient(x.q, needs.q, buffers.grad_q)
    k = _gradient(x.k, needs.k, buffers.grad_k)
    v = _gradient(x.v, needs.v, buffers.grad_v)
    call.grad_q, call.grad_k, call.grad_v = _place(q), _place(k), _place(v)
    gate, scale = _gate_gradient(x.log_gate, needs.log_gate), _gate_gradient(x.key_scale, needs.key_scale)
    call.grad_log_gate, call.grad_key_scale = (None if t is None else t.data_ptr() for t in (gate, scale))
    s, zm = _state_gradient(call, x.s, x.zm)
    grad_w = _map_gradient(call, x.w, needs.w)
    _run(kernels().dist_attn_attend_backward, call, backward=True)
    return Inputs(q, k, v, _like(gate, x.log_gate), _like(scale, x.key_scale), s, zm, _summed(grad_w, x.w))


def adjoint_read(
    terms: Terms, x: Tensors, out: torch.Tensor, den_mass: torch.Tensor, grad_out: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of the state before an attention without gates, S and z beside the mass: one walk over the queries.

    `den_mass` are the denominators and masses that the forward pass found.
    """
    call, alive = _attention_call(terms, x)
    call.out, call.grad_out = view(out), _view(grad_out, alive)
    den, mass = den_mass
    call.den, call.mass = _pointer(den, alive), _pointer(mass, alive)
    s, zm = _state_gradient(call, x.s, x.zm)
    _run(kernels().dist_attn_adjoint_read, call, backward=True)
    return s, zm


def read(terms: Terms, x: ReadTensors, out_dtype: torch.dtype) -> torch.Tensor:
    """Outputs [B, H, L, V] of queries that all read one state."""
    q, s = present(x.q), present(x.s)
    call, _alive = _read_call(terms, x)
    out = None if terms.buffers is None else terms.buffers.out
    if out is None:
        out = on_large_pages(torch.empty((*q.shape[:3], s.shape[3]), dtype=out_dtype))
    call.out = view(out)
    den_mass = _denominators(call, terms, False)
    _run(kernels().dist_attn_read, call, backward=False)
    _count(terms, den_mass)
    return out


def read_backward(
    terms: Terms, x: ReadTensors, needs: ReadInputs[bool], out: torch.Tensor, grad_out: torch.Tensor
) -> ReadTensors:
    """The gradients of the tensors from that of the outputs."""
    call, alive = _read_call(terms, x)
    call.out, call.grad_out = view(out), _view(grad_out, alive)
    q, sums = _gradient(x.q, needs.q), _gradient(x.sums, needs.sums)
    call.grad_q, call.grad_sums = _place(q), _place(sums)
    gate = _gate_gradient(x.log_gate, needs.log_gate)
    call.grad_log_gate = None if gate is None else gate.data_ptr()
    s, zm = _state_gradient(call, x.s, x.zm)
    grad_w = _map_gradient(call, x.w, needs.w)
    _run(kernels().dist_attn_read_backward, call, backward=True)
    return ReadInputs(q, _like(gate, x.log_gate), sums, s, zm, _summed(grad_w, x.w))


def _attention_call(terms: Terms, x: Tensors) -> tuple[Call, list[torch.Tensor]]:
    """The call as the kernels take it, and tensors that have to outlive it."""
    k, v = present(x.k), present(x.v)
    call, alive = _new_call(terms, k, v.shape[3], x, terms.documents)
    call.q, call.k, call.v = (_view(t, alive) for t in (x.q, k, v))
    call.log_gate, call.key_scale = (_view(_readable(t), alive) for t in (x.log_gate, x.key_scale))
    call.undivided = terms.undivided
    return call, alive


def _read_call(terms: Terms, x: ReadTensors) -> tuple[Call, list[torch.Tensor]]:
    q = present(x.q)
    call, alive = _new_call(terms, q, present(x.s).shape[3], x, ())
    call.q, call.log_gate, call.sums = (_view(t, alive) for t in (q, _readable(x.log_gate), x.sums))
    return call, alive


def _new_call(
    terms: Terms, tokens: torch.Tensor, values: int, x: Tensors | ReadTensors, documents: tuple[int, ...]
) -> tuple[Call, list[torch.Tensor]]:
    chunks = Chunks.of(tokens.shape[2], documents)
    w = None if x.w is None else x.w.detach().float().contiguous()
    alive = [t for t in (chunks.starts, chunks.fresh, w) if t is not None]
    call = new_call(
        tokens.shape, values, feature_map=terms.feature_map, policy=terms.denominator, chunks=chunks, w_HDK=w
    )
    call.s, call.zm = (_pointer(present(t).detach().contiguous(), alive) for t in (x.s, x.zm))
    return call, alive


def _readable(x: torch.Tensor | None) -> torch.Tensor | None:
    """Gates in one of the types that kernels read."""
    return x if x is None or x.dtype in (torch.float32, torch.bfloat16) else x.float()


def _pointer(x: torch.Tensor, alive: list[torch.Tensor]) -> int:
    alive.append(x)
    return x.data_ptr()


def _view(x: torch.Tensor | None, alive: list[torch.Tensor]) -> View:
    """Where a tensor lies; nowhere for None."""
    if x is None:
        return View()
    x = x.detach()
    if x.dim() == 4 and x.stride(-1) != 1:
        x = x.contiguous()
    alive.append(x)
    return view(x)


def _place(x: torch.Tensor | None) -> View:
    """Where a result is written; nowhere for None."""
    return View() if x is None else view(x)


def _empty_like(x: torch.Tensor) -> torch.Tensor:
    """Memory of x's type and sizes, laid out as x is where its rows lie in one piece."""
    empty = torch.empty_like(x)
    return on_large_pages(empty if empty.stride(-1) == 1 or x.dim() != 4 else torch.empty(x.shape, dtype=x.dtype))


def _gradient(
    x: torch.Tensor | None, need: bool, buffer: Callable[[], torch.Tensor] | None = None
) -> torch.Tensor | None:
    """Memory for the gradient of x, where it is asked for."""
    if x is None or not need:
        return None
    return _empty_like(x) if buffer is None else buffer()


def _gate_gradient(x: torch.Tensor | None, need: bool) -> torch.Tensor | None:
    return None if x is None or not need else torch.empty(x.shape)


def _state_gradient(call: Call, s: torch.Tensor | None, zm: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    grad_s, grad_zm = torch.empty(present(s).shape), torch.empty(present(zm).shape)
    call.grad_s, call.grad_zm = grad_s.data_ptr(), grad_zm.data_ptr()
    return grad_s, grad_zm


def _map_gradient(call: Call, w: torch.Tensor | None, need: bool) -> torch.Tensor | None:
    """Memory for the gradient of w, of each sequence of the batch by itself."""
    if w is None or not need:
        return None
    grad_w = torch.empty(call.batch, call.heads, call.projections, call.size)
    call.grad_w = grad_w.data_ptr()
    return grad_w


def _summed(grad_w: torch.Tensor | None, w: torch.Tensor | None) -> torch.Tensor | None:
    return None if grad_w is None else _like(grad_w.sum(0), w)


def _like(x: torch.Tensor | None, like: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None or like is None else x.to(like.dtype)


def _denominators(call: Call, terms: Terms, wanted: bool) -> torch.Tensor | None:
    """Memory for denominators and masses, where they are wanted or a watch counts them."""
    if not wanted and (current_watch() is None or terms.denominator.kind in ("mass", "one")):
        return None
    den_mass = torch.empty(2, call.batch, call.heads, call.tokens)
    call.den, call.mass = den_mass[0].data_ptr(), den_mass[1].data_ptr()
    return den_mass


def _count(terms: Terms, den_mass: torch.Tensor | None) -> None:
    watch = current_watch()
    if den_mass is not None and watch is not None and terms.denominator.kind not in ("mass", "one"):
        den, mass = den_mass
        watch.count(den, terms.denominator.guard(den, mass))


def _run(kernel: Callable[[Any], None], call: Call, *, backward: bool) -> None:
    library = kernels()
    count = library.dist_attn_backward_floats if backward else library.dist_attn_forward_floats
    call.memory_floats = count(ctypes.byref(call))
    # No more threads than there are heads to work on, and no memory for more.
    call.threads = max(1, min(call.threads, call.batch * call.heads))
    memory = torch.empty(call.threads, call.memory_floats)
    call.memory = memory.data_ptr()
    kernel(ctypes.byref(call))
