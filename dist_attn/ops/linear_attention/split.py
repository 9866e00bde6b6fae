"""Causal attention in parts: sums over the tokens at hand, and what is added when the state before them is known.

o_t = (N_t + Lambda_t phi(q_t) S) / den(d_t + Lambda_t phi(q_t).z), where N and d are sums from nothing, (S, z) the
state before the first token and Lambda_t the product of the gates so far. Numerator and denominator stay apart until
the global denominator is known. So the keys are walked once, and the state may be on its way meanwhile.

`SplitSequence` works on a call part by part, without copies of what the parts take and return.

Shape letters: B batch, H heads, L tokens, V values, X = V + 2 (numerators, denominators, masses).
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from dist_attn.ops.device import running_sums
from dist_attn.ops.linear_attention.block import bounded
from dist_attn.ops.linear_attention.call import LinearCall, OutputBuffers
from dist_attn.ops.linear_attention.implementation import choose
from dist_attn.ops.linear_attention.native import native_completed_sums, native_local_sums
from dist_attn.ops.linear_attention.streaming import stream_completed_sums, stream_sums
from dist_attn.ops.parts import Parts, Whole
from dist_attn.ops.state import LinearState


def local_sums(call: LinearCall, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, LinearState]:
    """Numerators, denominators and masses of causal attention, not divided yet, and the state after the last key.

    They count the call's state, which is that of the tokens at hand that come first, and nothing before it; with
    documents, what is of a token's own document. Gradients may be written to the call's buffers.

    Shapes: as `linear_attention` with as many queries as keys -> [B, H, L, V + 2] of at least the precision `dtype`.
    Raises: ShapeError when shapes do not fit together; ConfigError for an implementation that cannot take this call.
    """
    call.check()
    dtype = call.sums_dtype(dtype)
    choice = choose(replace(call, documents=()), sums=dtype, form="parts").implementation
    if choice == "native":
        return native_local_sums(call)
    if choice == "triton":
        # Not at the top: a machine without a GPU need not have triton.
        from dist_attn.ops.linear_attention.triton import triton_linear_attention

        return triton_linear_attention(call, undivided=True)
    if choice == "fla":
        # Likewise.
        from dist_attn.ops.linear_attention.fla import fla_linear_attention

        return fla_linear_attention(call, undivided=True)
    return stream_sums(call, dtype)


def complete_sums(call: LinearCall, sums_BHLX: torch.Tensor) -> torch.Tensor:
    """Attention over everything: `local_sums` and, decayed by the gates since, the state before their first token.

    That state is the call's; its keys and values count for nothing but their types. Gated, the walk over the queries
    ends where nothing of that state is left. Outputs may be written to the call's buffers.

    Shapes: sums [B, H, L, V + 2] -> [B, H, L, V] in v's dtype.
    Raises: ShapeError when shapes do not fit together; ConfigError for an implementation that cannot take this call.
    """
    q, before = call.q_BHLK, call.state
    assert before is not None  # what the sums are completed by
    # As many values as the state has: what the kernels are chosen by. On a GPU of the call's type, for which ranks have
    # tried them together; queries may be wider, where their gradients are added up.
    like_v = (call.v_BHSV.new_empty(1) if q.is_cuda else q[..., :1]).expand(*q.shape[:3], before.s_BHMV.shape[3])
    reads = replace(call, k_BHSK=q, v_BHSV=like_v, causal=True, documents=())
    choice = choose(reads, sums=sums_BHLX.dtype, form="parts").implementation
    if choice == "native":
        return native_completed_sums(call, sums_BHLX)
    if choice == "triton":
        return _complete_by_triton(call, before, sums_BHLX)
    return stream_completed_sums(call, sums_BHLX)


def _complete_by_triton(call: LinearCall, before: LinearState, sums_BHLX: torch.Tensor) -> torch.Tensor:
    from dist_attn.ops.linear_attention.triton_full import triton_read

    num, den = triton_read(call, undivided=True)
    assert den is not None  # given where nothing was divided
    mass = before.mass_BH[..., None].expand_as(den)
    if call.log_gate_BHS is not None:
        kept = running_sums(bounded(call.log_gate_BHS, sums_BHLX.dtype)).exp()
        num, den, mass = num * kept[..., None], den * kept, mass * kept
    out = call.denominator.divide(num + sums_BHLX[..., :-2], den + sums_BHLX[..., -2], mass + sums_BHLX[..., -1])
    return out.to(call.v_BHSV.dtype)


def tokens_until_forgotten(log_gate_BHL: torch.Tensor | None, tokens: int) -> int:
    """The number of tokens after which no head keeps anything of the state before; `tokens` where one keeps some.

    `complete_sums` adds nothing behind these. Not asked of a GPU, which would have to wait.
    """
    if log_gate_BHL is None or log_gate_BHL.device.type != "cpu" or torch.compiler.is_compiling():
        return tokens
    if not log_gate_BHL.numel():
        return tokens
    with torch.no_grad():
        most_L = bounded(log_gate_BHL, torch.float32).cumsum(-1).amax(dim=(0, 1))
        # A NaN is no forgetting: other heads go on.
        known_L = ~(most_L < math.log(torch.finfo(torch.float32).tiny))
        last = int(known_L.nonzero().max()) if bool(known_L.any()) else -1
        return min(tokens, last + 2)


class SplitSequence:
    """A call of as many queries as keys in parts that end at `cuts`, and the outputs [B, H, L, V] of all.

    A part has buffers for its outputs and gradients, see `ops.parts`.
    """

    def __init__(self, call: LinearCall, cuts: Sequence[int]) -> None:
        self._call, self._edges = call, (0, *cuts)
        self._qkv = tuple(Parts(x, self._edges, dim=2) for x in call.qkv)
        self._out = Whole(call.v_BHSV, self._edges, dim=2)

    def part(self, number: int) -> LinearCall:
        """The call of a part, with its buffers."""
        start, stop = self._edges[number : number + 2]
        q, k, v = (x.parts[number] for x in self._qkv)
        buffers = OutputBuffers(self._out.place(number), *(x.place(number) for x in self._qkv))
        return replace(self._call.tokens(start, stop), q_BHLK=q, k_BHSK=k, v_BHSV=v, buffers=buffers)

    def join(self, outputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """The outputs of all parts."""
        return self._out.join(outputs)
