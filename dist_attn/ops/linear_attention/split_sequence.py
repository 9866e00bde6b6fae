"""A call that is worked on part by part, without copies of what the parts take and return.

Outputs are written to their place in one tensor, and so are gradients of queries, keys and values. Where something came
to lie elsewhere, as it does in implementations that do not write in place, it is copied.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from dist_attn.ops.linear_attention.call import LinearCall, OutputBuffers
from dist_attn.ops.processor import on_large_pages


class SplitSequence:
    """A call of as many queries as keys in parts that end at `cuts`, and the outputs [B, H, L, V] of all.

    A part has buffers for its outputs and gradients. Only one implementation's call may be given those of a part: two
    would write over each other.
    """

    def __init__(self, call: LinearCall, cuts: Sequence[int]) -> None:
        self._call, self._edges = call, (0, *cuts)
        qkv = call.q_BHLK, call.k_BHSK, call.v_BHSV
        self._grads = tuple(_GradientBuffer(x, self._edges) for x in qkv)
        self._parts = tuple(
            (x,) if len(self._edges) == 2 else _Split.apply(x, grad)  # type: ignore[no-untyped-call]
            for x, grad in zip(qkv, self._grads, strict=True)
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
