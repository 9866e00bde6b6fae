"""A sequence that is worked on part by part, without copies of what the parts give and are given.

Outputs are written to their place in one tensor, and so are gradients of queries, keys and values. Where something came
to lie elsewhere, as it does in implementations that do not write in place, it is copied.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from dist_attn.ops.large_pages import on_large_pages

__all__ = ["PartedSequence", "Rooms"]


class Rooms(NamedTuple):
    """Where an implementation may write: outputs, and in its backward pass the gradients of q, k and v."""

    out: torch.Tensor | None
    grads: tuple[Callable[[], torch.Tensor], ...] = ()


class PartedSequence:
    """Queries, keys and values [B, H, L, ...] in parts that end at `cuts`, and the outputs [B, H, L, V].

    Only one implementation's call may be given the rooms of a part: two would write over each other.
    """

    def __init__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cuts: Sequence[int]) -> None:
        self._edges = (0, *cuts)
        self._grads = tuple(_GradientRoom(x, self._edges) for x in (q, k, v))
        self._parts = tuple(
            (x,) if len(self._edges) == 2 else _Split.apply(x, grad)  # type: ignore[no-untyped-call]
            for x, grad in zip((q, k, v), self._grads, strict=True)
        )
        # Memory of a CPU that nobody writes to costs nothing; elsewhere no implementation writes in place.
        self._whole = on_large_pages(torch.empty(v.shape, dtype=v.dtype)) if v.device.type == "cpu" else None

    def part(self, number: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values of a part."""
        q, k, v = (parts[number] for parts in self._parts)
        return q, k, v

    def rooms(self, number: int) -> Rooms | None:
        """Where those and the outputs of a part may be written to."""
        if self._whole is None:
            return None
        start, stop = self._edges[number : number + 2]
        return Rooms(self._whole[:, :, start:stop], tuple(grad.room(start, stop) for grad in self._grads))

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


class _GradientRoom:
    """Where the gradient of a whole input is put together. A graph holds this, so it must hold nothing of a graph."""

    def __init__(self, x: torch.Tensor, edges: Sequence[int]) -> None:
        self._shape, self._dtype, self._device = x.shape, x.dtype, x.device
        self.edges = edges
        self._whole: torch.Tensor | None = None

    def room(self, start: int, stop: int) -> Callable[[], torch.Tensor]:
        """That of some tokens, when it is asked for."""
        return lambda: self.whole()[:, :, start:stop]

    def whole(self) -> torch.Tensor:
        """Room for all of it, the same until it is taken."""
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
    def forward(ctx: Any, x: torch.Tensor, grad: _GradientRoom) -> Any:
        ctx.grad = grad
        return tuple(x[:, :, a:b] for a, b in pairwise(grad.edges))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        room: _GradientRoom = ctx.grad
        if torch.is_grad_enabled():
            return torch.cat(grads, dim=2), None
        whole = room.take()
        for grad, (start, stop) in zip(grads, pairwise(room.edges), strict=True):
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
    """Whether this is what stands at that place already."""
    same = x.data_ptr() == place.data_ptr() and x.stride() == place.stride() and x.dtype == place.dtype
    return not x.numel() or same
