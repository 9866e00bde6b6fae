"""Affine recurrences by flash-linear-attention's kernels, each of which computes one special case.

`fla.ops` takes tokens before heads, log decays in float32, and b before a for an erasure a b^T. It takes the state
before and returns the one after, which ranks exchange as usual. A closed gate is raised to where exp gives 0, since fla
would subtract infinities. Nothing is kept: the backward pass makes the results again and then runs fla's own.

With bfloat16 inputs states are rounded between chunks; with float32 inputs a GPU's products are TF32.

Importing this module needs fla (fla-core); `implementation.choose` says whether a call can come here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from fla.ops.gated_delta_rule import chunk_gated_delta_rule
from fla.ops.generalized_delta_rule import chunk_dplr_delta_rule
from fla.ops.gla import chunk_gla
from fla.ops.kda import chunk_kda
from fla.ops.rwkv6 import chunk_rwkv6
from fla.ops.simple_gla import chunk_simple_gla

from dist_attn.ops.affine.call import AffineCall, AffineTensors, Read
from dist_attn.ops.affine.implementation import fla_operation
from dist_attn.ops.affine.state import AffineState
from dist_attn.ops.affine.streaming import stream_recurrence
from dist_attn.ops.device import without_autocast
from dist_attn.ops.kernel_operation import KernelOperation, Tensors, gradients_again, present
from dist_attn.ops.kernel_target import use_newest_assembler
from dist_attn.ops.linear_attention.block import bounded
from dist_attn.ops.linear_attention.fla import run_kernels

use_newest_assembler()


def fla_recurrence(call: AffineCall) -> tuple[torch.Tensor, AffineState]:
    """`affine_recurrence` or `gated_delta_rule` of a call with tokens that `choose` gives to these kernels."""
    x, dtype = call.inputs(None if call.state is None else call.state.s_BHKV), call.products_dtype()
    # Before the operation, so that what is kept for the backward pass is as narrow.
    q, k, v, a, b = (None if t is None else t.to(dtype) for t in (x.q, x.k, x.v, x.a, x.b))
    out, after = _FlaKernels(call.read, call.documents)(x._replace(q=q, k=k, v=v, a=a, b=b))
    return present(out).to(call.v_BHLV.dtype), AffineState(present(after))


@dataclass(frozen=True)
class _FlaKernels(KernelOperation[AffineTensors]):
    read: Read
    documents: tuple[int, ...]

    def forward(self, x: AffineTensors, *, keep: bool) -> tuple[Tensors, Tensors]:
        return self._results(x), ()

    def backward(self, x: AffineTensors, needs: AffineTensors, grads: Tensors, kept: Tensors) -> AffineTensors:
        return gradients_again(self._results, x, needs, grads)

    def replay(self, x: AffineTensors) -> Tensors:
        out, after = stream_recurrence(AffineCall.of(x, self.read, self.documents))
        return out, after.s_BHKV

    def _results(self, x: AffineTensors) -> Tensors:
        call = AffineCall.of(x, self.read, self.documents)
        with without_autocast(call.v_BHLV.device):
            kernels, tensors = _kernels_of(call)
            before_BHKV = call.first_sums(torch.float32).contiguous()
            out, after = run_kernels(kernels, tensors, before_BHKV, self.documents)
            return out.transpose(1, 2).to(call.v_BHLV.dtype), after


def _kernels_of(call: AffineCall) -> tuple[Callable[..., Tensors], list[torch.Tensor]]:
    """The operation, and its tensors with tokens before heads."""
    q, k, v, decay, a, b, beta = (None if t is None else t.transpose(1, 2).contiguous() for t in call.sequence)
    q, k, v, decay = map(present, (q, k, v, decay))
    decay = bounded(decay, torch.float32)
    kind = fla_operation(call)
    if kind == "fla_simple_gla":
        return chunk_simple_gla, [q, k, v, decay[..., 0]]
    if kind == "fla_gla":
        return chunk_gla, [q, k, v, decay]
    if kind == "fla_gated_delta":
        return chunk_gated_delta_rule, [q, k, v, decay[..., 0], present(beta).float()]
    if kind == "fla_kda":
        return chunk_kda, [q, k, v, decay, present(beta).float()]
    decay = decay.expand_as(k)
    if kind == "fla_dplr":
        return chunk_dplr_delta_rule, [q, k, v, present(b), present(a), decay]
    bonus_HK = k.new_zeros(k.shape[2:]) if call.bonus_HK is None else call.bonus_HK
    return partial(chunk_rwkv6, u=bonus_HK.float()), [q, k, v, decay]
