"""Affine recurrences by C kernels for processors: chunks that stay in a core's cache, heads in parallel.

The chunk algebra is that of `streaming.py`, but the state is at hand where a chunk is solved, so nothing is solved for
but values. Sums are float32; numbers below 1e-38 count as 0. Each head is one thread's work from beginning to end, so
results depend neither on the number of threads nor on what else is in the batch.

`implementation.choose` says whether a call can come here.

Shape letters: B batch, H heads, L tokens, K key size, V values.
"""

import ctypes
from dataclasses import dataclass, replace

import torch

from dist_attn.ops.affine.call import AffineBuffers, AffineCall, AffineTensors, Inputs, Read
from dist_attn.ops.affine.state import AffineState
from dist_attn.ops.affine.streaming import absorbed, stream_recurrence, stream_sums
from dist_attn.ops.c_call import CCall, Chunks, ints, kernels_of, pointers, views
from dist_attn.ops.kernel_operation import KernelOperation, Tensors, present
from dist_attn.ops.parts import Place, empty_like
from dist_attn.ops.state import writes_in_place


class NativeRecurrence(ctypes.Structure):
    """One call as the C kernels read it, `csrc/affine_call.h` field by field; what is not set is not there."""

    _fields_ = [
        *ints("batch heads tokens size values decays reads_before threads num_chunks save_every"),
        *pointers("chunks fresh"),
        *views("q k v out log_decay a b beta"),
        *pointers("bonus s s_after kept"),
        *views("grad_out grad_q grad_k grad_v grad_log_decay grad_a grad_b grad_beta"),
        *pointers("grad_bonus grad_s_after grad_s memory"),
        *ints("memory_floats"),
    ]


def kernels() -> ctypes.CDLL:
    """The compiled kernels.

    Raises: NoLibraryError where there are none.
    """
    return kernels_of("affine", NativeRecurrence)


def native_recurrence(call: AffineCall) -> tuple[torch.Tensor, AffineState]:
    """`recur` of a call that is checked."""
    inputs = call.inputs(call.first_sums(torch.float32))
    out, s_BHKV = _Recurrence(call.read, call.documents, call.buffers)(inputs)
    return present(out), AffineState(present(s_BHKV))


def native_absorb(call: AffineCall) -> AffineState:
    """`absorb` of a call that is checked."""
    return absorbed(call, torch.float32, _sums_after)


def _sums_after(call: AffineCall, first_BHKV: torch.Tensor) -> torch.Tensor:
    """S after the call's last token, from this one; queries count for nothing."""
    inputs = call.inputs(first_BHKV)._replace(q=None, bonus=None)
    return present(_Recurrence(call.read, call.documents)(inputs)[1])


@dataclass(frozen=True)
class _Recurrence(KernelOperation[AffineTensors]):
    """Outputs, if there are queries, and S after the last token."""

    read: Read
    documents: tuple[int, ...]
    buffers: AffineBuffers | None = None

    def for_backward(self) -> "_Recurrence":
        # A graph that held its own output would never be freed.
        return self if self.buffers is None else replace(self, buffers=self.buffers._replace(out=None))

    def forward(self, x: AffineTensors, *, keep: bool) -> tuple[Tensors, Tensors]:
        v, s = present(x.v), present(x.s)
        call = self._call(x)
        out = None if x.q is None or self.buffers is None else self.buffers.out
        out = empty_like(v) if x.q is not None and out is None else out
        s_after = s if v.shape[2] == 1 and s.is_contiguous() and writes_in_place() else torch.empty(s.shape)
        kept = call.states() if keep else None
        call.write(out=out)
        call.point(s_after=s_after, kept=kept)
        call.run("recur")
        return (out, s_after), (kept,)

    def backward(self, x: AffineTensors, needs: AffineTensors, grads: Tensors, kept: Tensors) -> AffineTensors:
        call = self._call(x)
        out, s_after = grads
        bonus = None if x.bonus is None else torch.empty(present(x.k).shape[0], *x.bonus.shape)
        places = (None,) * len(x) if self.buffers is None else self.buffers.grads
        along = [_gradient(*each) for each in zip(x, needs, places, strict=True)]
        totals = Inputs(*along)._replace(bonus=bonus, s=torch.empty(present(x.s).shape))
        call.read(grad_out=out)
        call.point(kept=kept[0], grad_s_after=s_after, grad_s=totals.s, grad_bonus=totals.bonus)
        call.write(grad_q=totals.q, grad_k=totals.k, grad_v=totals.v, grad_log_decay=totals.log_decay)
        call.write(grad_a=totals.a, grad_b=totals.b, grad_beta=totals.beta)
        call.run("recur_backward", backward=True)
        return totals._replace(bonus=None if bonus is None else bonus.sum(0).to(present(x.bonus).dtype))

    def replay(self, x: AffineTensors) -> Tensors:
        call = AffineCall.of(x, self.read, self.documents)
        if x.q is None:
            return None, stream_sums(call, present(x.s))
        out, after = stream_recurrence(call)
        return out, after.s_BHKV

    def _call(self, x: AffineTensors) -> CCall:
        k, v, log_decay = present(x.k), present(x.v), present(x.log_decay)
        fields = NativeRecurrence(*k.shape, v.shape[3], log_decay.shape[3], self.read == "before")
        call = CCall(kernels(), fields, Chunks.of(k.shape[2], self.documents))
        call.read(q=x.q, k=k, v=v, log_decay=log_decay, a=x.a, b=x.b, beta=x.beta)
        call.point(s=x.s, bonus=None if x.bonus is None else x.bonus.float())
        return call


def _gradient(x: torch.Tensor | None, need: object, place: Place | None) -> torch.Tensor | None:
    """Memory for the gradient of x, where it is asked for."""
    if x is None or not need:
        return None
    return empty_like(x) if place is None else place()
