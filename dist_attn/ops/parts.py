"""Tensors in parts along a dimension, without copies of what work on the parts takes and returns.

Results are written to their place in one tensor, and so are gradients of the parts. Where something came to lie
elsewhere, as it does in implementations that do not write in place, it is copied.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, final

import torch

from dist_attn.ops.processor import on_large_pages

Place = Callable[[], torch.Tensor]
"""Memory that a gradient may be written to, allocated at the first call."""


@final
class Parts:
    """The parts of x between `edges` along a dimension, 1 or 2, and places for their gradients.

    `tie` has no numbers, [0, 1]: whatever is `connected` to it depends on x, whether a part is used or not. Only one
    call may be given the place of a part: two would write over each other.
    """

    def __init__(self, x: torch.Tensor, edges: Sequence[int], dim: int) -> None:
        self._grad = _Gradient(x, edges, dim)
        if torch.compiler.is_compiling():  # into a graph that holds tensors only, and writes nothing in place
            self.tie, self.parts = x.reshape(-1, 1)[:0], _places(x, edges, dim)
        else:
            self.tie, *self.parts = _Cut.apply(x, self._grad)  # type: ignore[no-untyped-call]

    def place(self, number: int) -> Place:
        """The memory for the gradient of a part."""
        grad = self._grad
        return lambda: grad.places()[number]


@final
class Whole:
    """Memory for results laid out as `like` is, in parts between `edges` along a dimension.

    A CPU's memory that is not written to costs nothing; elsewhere, and in compiled graphs, nothing writes in place.
    """

    def __init__(self, like: torch.Tensor, edges: Sequence[int], dim: int) -> None:
        in_place = like.device.type == "cpu" and not torch.compiler.is_compiling()
        self._whole = empty_like(like) if in_place else None
        self._edges, self._dim = edges, dim

    def place(self, number: int) -> torch.Tensor | None:
        """The memory for the results of a part; None: there is none."""
        return None if self._whole is None else _places(self._whole, self._edges, self._dim)[number]

    def join(self, results: Sequence[torch.Tensor]) -> torch.Tensor:
        """The results of all parts."""
        if len(results) == 1:
            return results[0]
        if self._whole is None or not all(map(_lies_in, results, _places(self._whole, self._edges, self._dim))):
            return torch.cat(list(results), dim=self._dim)
        joined: torch.Tensor = _Joined.apply(self._whole, self._dim, *results)  # type: ignore[no-untyped-call]
        return joined


def empty_like(x: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """Memory of x's type and sizes, on x's device or another, laid out as x is where its rows lie in one piece."""
    empty = torch.empty_like(x, device=device)
    if empty.dim() == 4 and empty.stride(-1) != 1:
        empty = torch.empty(x.shape, dtype=x.dtype, device=empty.device)
    return on_large_pages(empty)


def connected(x: torch.Tensor, tie: torch.Tensor) -> torch.Tensor:
    """x itself, as far as autograd can see made of rows of `tie` too, of which none count; their width is any."""
    # In two dimensions: of a tensor of shape [0] the backward pass of `cat` forgets where its gradient came from.
    return torch.cat([x.reshape(-1, 1), tie[:0].reshape(0, 1)]).reshape(x.shape)


class _Gradient:
    """The memory for the gradient of a whole tensor. A graph holds this, so it must hold nothing of a graph."""

    def __init__(self, x: torch.Tensor, edges: Sequence[int], dim: int) -> None:
        self._like, self._device = torch.empty_like(x, device="meta"), x.device
        self.edges, self.dim = edges, dim
        self._whole: torch.Tensor | None = None

    def places(self) -> list[torch.Tensor]:
        """The parts of the memory, the same until it is taken."""
        if self._whole is None:
            self._whole = empty_like(self._like, self._device)
        return _places(self._whole, self.edges, self.dim)

    def take(self, grads: Sequence[torch.Tensor]) -> torch.Tensor:
        """The whole of these gradients of the parts, which is not written to any more."""
        for grad, place in zip(grads, self.places(), strict=True):
            if not _lies_in(grad, place):
                place.copy_(grad)
        whole, self._whole = self._whole, None
        assert whole is not None  # its places were looked at
        return whole


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, grad: _Gradient) -> Any:
        ctx.grad = grad
        return x.new_empty(0, 1), *_places(x, grad.edges, grad.dim)

    @staticmethod
    def backward(ctx: Any, tie: torch.Tensor, *grads: torch.Tensor) -> Any:
        gradient: _Gradient = ctx.grad
        if torch.is_grad_enabled():
            # A pass through the gradients goes through whatever the parts were connected to by their tie.
            return connected(torch.cat(grads, dim=gradient.dim), tie), None
        return gradient.take(grads), None


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, dim: int, *parts: torch.Tensor) -> torch.Tensor:
        ctx.dim, ctx.sizes = dim, [part.shape[dim] for part in parts]
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return (None, None, *grads[0].split(ctx.sizes, dim=ctx.dim))


def _places(whole: torch.Tensor, edges: Sequence[int], dim: int) -> list[torch.Tensor]:
    return [whole.narrow(dim, start, stop - start) for start, stop in pairwise(edges)]


def _lies_in(x: torch.Tensor, place: torch.Tensor) -> bool:
    """Return whether x lies at that place already."""
    same = x.data_ptr() == place.data_ptr() and x.stride() == place.stride() and x.dtype == place.dtype
    return not x.numel() or same
