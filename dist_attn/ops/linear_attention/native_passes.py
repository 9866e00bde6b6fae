"""The passes of the C kernels over whole tensors, forward and backward: memory for results, one call each.

Shape letters: B batch, H heads, L tokens, K head size, D projections, V values.
"""

from typing import Generic, NamedTuple

import torch

from dist_attn.ops.c_call import Chunks
from dist_attn.ops.kernel_operation import Each, present
from dist_attn.ops.linear_attention.call import OutputBuffers
from dist_attn.ops.linear_attention.differentiable import LinearInputs, LinearTensors, LinearTerms, Results, converted
from dist_attn.ops.linear_attention.native_call import KernelCall
from dist_attn.ops.parts import Place, empty_like
from dist_attn.ops.processor import on_large_pages


class NativeReadInputs(NamedTuple, Generic[Each]):
    """A value for each tensor of a read, as `LinearInputs`; the read-out is added to `sums` before it is divided."""

    q: Each
    log_gate: Each
    sums: Each
    s: Each
    zm: Each
    w: Each


ReadTensors = NativeReadInputs[torch.Tensor | None]


class Passed(NamedTuple):
    """The results of a forward pass: outputs (None of no queries), the state's sums, and states for the backward pass.

    den_mass: denominators and masses [2, B, H, L], where they were asked for.
    """

    results: Results
    kept: torch.Tensor | None
    den_mass: torch.Tensor | None


def attend(terms: LinearTerms, x: LinearTensors, *, keep: bool, denominators: bool = False) -> Passed:
    """The forward pass; with `keep`, what `attend_backward` begins with is kept, at most 16 states of each head."""
    v, s, zm = present(x.v), present(x.s), present(x.zm)
    call = _attention_call(terms, x)
    s_after, zm_after = torch.empty(s.shape), torch.empty(zm.shape)
    out = den_mass = None
    if x.q is not None:
        out = None if terms.buffers is None else terms.buffers.out
        if terms.undivided:
            out = on_large_pages(torch.empty((*v.shape[:3], v.shape[3] + 2)))
        elif out is None:
            out = empty_like(v)
        den_mass = _denominators(terms, v, denominators)
    kept = call.states() if keep else None
    call.write(out=out)
    call.point(s_after=s_after, zm_after=zm_after, kept=kept, **_den_mass(den_mass))
    call.run("attend")
    if den_mass is not None:
        terms.denominator.tell_watch(*den_mass)
    return Passed(Results(out, s_after, zm_after), kept, den_mass)


def attend_backward(
    terms: LinearTerms,
    x: LinearTensors,
    needs: LinearTensors,
    grads: Results,
    *,
    out: torch.Tensor | None,
    kept: torch.Tensor | None,
) -> LinearTensors:
    """The gradients of the tensors from those of the results.

    `out` and `kept` are what the forward pass gave; keys without queries and gates need neither.
    """
    call = _attention_call(terms, x)
    call.read(out=out, grad_out=grads.out)
    call.point(kept=kept, grad_s_after=grads.s, grad_zm_after=grads.zm)
    buffers = OutputBuffers(None) if terms.buffers is None else terms.buffers
    totals = LinearInputs(
        q=_gradient(x.q, needs.q, buffers.grad_q),
        k=_gradient(x.k, needs.k, buffers.grad_k),
        v=_gradient(x.v, needs.v, buffers.grad_v),
        log_gate=_whole_gradient(x.log_gate, needs.log_gate),
        key_scale=_whole_gradient(x.key_scale, needs.key_scale),
        s=torch.empty(present(x.s).shape),
        zm=torch.empty(present(x.zm).shape),
        w=_map_gradient(present(x.k), x.w, needs.w),
    )
    call.write(grad_q=totals.q, grad_k=totals.k, grad_v=totals.v)
    call.point(grad_log_gate=totals.log_gate, grad_key_scale=totals.key_scale)
    call.point(grad_s=totals.s, grad_zm=totals.zm, grad_w=totals.w)
    call.run("attend_backward", backward=True)
    return totals._replace(
        log_gate=converted(totals.log_gate, x.log_gate),
        key_scale=converted(totals.key_scale, x.key_scale),
        w=None if totals.w is None else converted(totals.w.sum(0), x.w),
    )


def adjoint_read(
    terms: LinearTerms, x: LinearTensors, out: torch.Tensor, den_mass: torch.Tensor, grad_out: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of the state before an attention without gates, S and z beside the mass: one walk over the queries.

    `den_mass` are the denominators and masses that the forward pass has left.
    """
    call = _attention_call(terms, x)
    grad_s, grad_zm = torch.empty(present(x.s).shape), torch.empty(present(x.zm).shape)
    call.read(out=out, grad_out=grad_out)
    call.point(grad_s=grad_s, grad_zm=grad_zm, **_den_mass(den_mass))
    call.run("adjoint_read", backward=True)
    return grad_s, grad_zm


def read(terms: LinearTerms, x: ReadTensors, out_dtype: torch.dtype) -> torch.Tensor:
    """Outputs [B, H, L, V] of queries that all read one state."""
    q, s = present(x.q), present(x.s)
    out = None if terms.buffers is None else terms.buffers.out
    if out is None:
        out = on_large_pages(torch.empty((*q.shape[:3], s.shape[3]), dtype=out_dtype))
    call, den_mass = _read_call(terms, x), _denominators(terms, q, False)
    call.write(out=out)
    call.point(**_den_mass(den_mass))
    call.run("read")
    if den_mass is not None:
        terms.denominator.tell_watch(*den_mass)
    return out


def read_backward(
    terms: LinearTerms, x: ReadTensors, needs: ReadTensors, out: torch.Tensor, grad_out: torch.Tensor
) -> ReadTensors:
    """The gradients of the tensors from that of the outputs."""
    call = _read_call(terms, x)
    call.read(out=out, grad_out=grad_out)
    totals = NativeReadInputs(
        q=_gradient(x.q, needs.q),
        log_gate=_whole_gradient(x.log_gate, needs.log_gate),
        sums=_gradient(x.sums, needs.sums),
        s=torch.empty(present(x.s).shape),
        zm=torch.empty(present(x.zm).shape),
        w=_map_gradient(present(x.q), x.w, needs.w),
    )
    call.write(grad_q=totals.q, grad_sums=totals.sums)
    call.point(grad_log_gate=totals.log_gate, grad_s=totals.s, grad_zm=totals.zm, grad_w=totals.w)
    call.run("read_backward", backward=True)
    return totals._replace(
        log_gate=converted(totals.log_gate, x.log_gate),
        w=None if totals.w is None else converted(totals.w.sum(0), x.w),
    )


def _attention_call(terms: LinearTerms, x: LinearTensors) -> KernelCall:
    k, v = present(x.k), present(x.v)
    call = KernelCall(k, v.shape[3], Chunks.of(k.shape[2], terms.documents))
    call.compute(terms.feature_map, x.w, terms.denominator)
    call.fields.undivided = terms.undivided
    call.read(q=x.q, k=k, v=v, log_gate=x.log_gate, key_scale=x.key_scale)
    call.point(s=x.s, zm=x.zm)
    return call


def _read_call(terms: LinearTerms, x: ReadTensors) -> KernelCall:
    q = present(x.q)
    call = KernelCall(q, present(x.s).shape[3], Chunks.of(q.shape[2], ()))
    call.compute(terms.feature_map, x.w, terms.denominator)
    call.read(q=q, log_gate=x.log_gate, sums=x.sums)
    call.point(s=x.s, zm=x.zm)
    return call


def _gradient(x: torch.Tensor | None, need: object, buffer: Place | None = None) -> torch.Tensor | None:
    """Memory for the gradient of x, where it is asked for."""
    if x is None or not need:
        return None
    return empty_like(x) if buffer is None else buffer()


def _whole_gradient(x: torch.Tensor | None, need: object) -> torch.Tensor | None:
    """Memory for the gradient of x in float32 and in one piece, where it is asked for."""
    return None if x is None or not need else torch.empty(x.shape)


def _map_gradient(tokens_BHLK: torch.Tensor, w_HDK: torch.Tensor | None, need: object) -> torch.Tensor | None:
    """Memory for the gradient of w, of each sequence of the batch by itself."""
    return None if w_HDK is None or not need else torch.empty(tokens_BHLK.shape[0], *w_HDK.shape)


def _den_mass(den_mass: torch.Tensor | None) -> dict[str, torch.Tensor | None]:
    """Denominators and masses as fields of a call."""
    return {} if den_mass is None else {"den": den_mass[0], "mass": den_mass[1]}


def _denominators(terms: LinearTerms, tokens_BHL: torch.Tensor, asked: bool) -> torch.Tensor | None:
    """Memory for denominators and masses, where they are asked for or a watch counts them."""
    if not (asked or terms.denominator.is_watched):
        return None
    return torch.empty(2, *tokens_BHL.shape[:3])
