"""Causal attention in parts: sums over the tokens at hand, and what is added when the state before them is known.

o_t = (N_t + Lambda_t phi(q_t) S) / den(d_t + Lambda_t phi(q_t).z), where N and d are sums from nothing, (S, z) the
state before the first token and Lambda_t the product of the gates so far. Numerator and denominator stay apart until
the global denominator is known. So the keys are walked once, and the state may be on its way meanwhile.

`SplitSequence` works on a call part by part, without copies of what the parts take and return.

Shape letters: B batch, H heads, L tokens, V values, X = V + 2 (numerators, denominators, masses).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from dist_attn.ops.linear_attention.block import bounded
from dist_attn.ops.linear_attention.call import LinearCall, OutputBuffers
from dist_attn.ops.linear_attention.implementation import choose
from dist_attn.ops.linear_attention.native import native_completed_sums, native_local_sums
from dist_attn.ops.linear_attention.streaming import stream_completed_sums, stream_sums
from dist_attn.ops.processor import on_large_pages
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
    choice = choose(replace(call, documents=()), sums=dtype).implementation
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
    # As many values as the state has, of the queries' type: what the kernels are chosen by.
    like_v = q[..., :1].expand(*q.shape[:3], before.s_BHMV.shape[3])
    reads = replace(call, k_BHSK=q, v_BHSV=like_v, causal=True, documents=())
    choice = choose(reads, sums=sums_BHLX.dtype).implementation
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
        kept = bounded(call.log_gate_BHS, sums_BHLX.dtype).cumsum(-1).exp()
        num, den, mass = num * kept[..., None], den * kept, mass * kept
    out = call.denominator.divide(num + sums_BHLX[..., :-2], den + sums_BHLX[..., -2], mass + sums_BHLX[..., -1])
    return out.to(call.v_BHSV.dtype)


def tokens_until_forgotten(log_gate_BHL: torch.Tensor | None, tokens: int) -> int:
    """After how many of so many tokens nothing is left of any head's state before them; all, where that never is.

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

    Outputs are written to their place in one tensor, and so are gradients of queries, keys and values. Where something
    came to lie elsewhere, as it does in implementations that do not write in place, it is copied.

    A part has buffers for its outputs and gradients. Only one implementation's call may be given those of a part: two
    would write over each other.
    """

    def __init__(self, call: LinearCall, cuts: Sequence[int]) -> None:
        self._call, self._edges = call, (0, *cuts)
        self._grads = tuple(_GradientBuffer(x, self._edges) for x in call.qkv)
        self._parts = tuple(
            (x,) if len(self._edges) == 2 else _Split.apply(x, grad)  # type: ignore[no-untyped-call]
            for x, grad in zip(call.qkv, self._grads, strict=True)
        )
        # Memory of a CPU that is not written to costs nothing; elsewhere no implementation writes in place.
        v = call.v_BHSV
        self._whole = on_large_pages(torch.empty(v.shape, dtype=v.dtype)) if v.device.type == "cpu" else None

    def part(self, number: int) -> LinearCall:
        """The call of a part, with its buffers."""
        start, stop = self._edges[number : number + 2]
        q, k, v = (parts[number] for parts in self._parts)
        buffers = None
        if self._whole is not None:
            grads = (grad.tokens(start, stop) for grad in self._grads)
            buffers = OutputBuffers(self._whole[:, :, start:stop], *grads)
        return replace(self._call.tokens(start, stop), q_BHLK=q, k_BHSK=k, v_BHSV=v, buffers=buffers)

    def join(self, outputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """The outputs of all parts."""
        whole = self._whole
        if len(outputs) == 1:
            return outputs[0]
        places = [] if whole is None else [whole[:, :, a:b] for a, b in pairwise(self._edges)]
        if whole is None or not all(map(_lies_in, outputs, places)):
            return torch.cat(list(outputs), dim=2)
        joined: torch.Tensor = _Joined.apply(whole, *outputs)  # type: ignore[no-untyped-call]
        return joined


class _GradientBuffer:
    """Where the gradient of a whole input is put together. A graph holds this, so it must hold nothing of a graph."""

    def __init__(self, x: torch.Tensor, edges: Sequence[int]) -> None:
        self._shape, self._dtype, self._device = x.shape, x.dtype, x.device
        self.edges = edges
        self._whole: torch.Tensor | None = None

    def tokens(self, start: int, stop: int) -> Callable[[], torch.Tensor]:
        """Allocates the whole, at the first call, and returns the part of some tokens."""
        return lambda: self.whole()[:, :, start:stop]

    def whole(self) -> torch.Tensor:
        """Memory for all of it, the same until it is taken."""
        if self._whole is None:
            empty = torch.empty(self._shape, dtype=self._dtype, device=self._device)
            self._whole = on_large_pages(empty)
        return self._whole

    def take(self) -> torch.Tensor:
        """The whole, which is not written to any more."""
        whole, self._whole = self.whole(), None
        return whole


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, grad: _GradientBuffer) -> Any:
        ctx.grad = grad
        return tuple(x[:, :, a:b] for a, b in pairwise(grad.edges))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        buffer: _GradientBuffer = ctx.grad
        if torch.is_grad_enabled():
            return torch.cat(grads, dim=2), None
        whole = buffer.take()
        for grad, (start, stop) in zip(grads, pairwise(buffer.edges), strict=True):
            place = whole[:, :, start:stop]
            if not _lies_in(grad, place):
                place.copy_(grad)
        return whole, None


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, *parts: torch.Tensor) -> torch.Tensor:
        ctx.tokens = [part.shape[2] for part in parts]
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return (None, *grads[0].split(ctx.tokens, dim=2))


def _lies_in(x: torch.Tensor, place: torch.Tensor) -> bool:
    """Whether x is what stands at that place already."""
    same = x.data_ptr() == place.data_ptr() and x.stride() == place.stride() and x.dtype == place.dtype
    return not x.numel() or same
