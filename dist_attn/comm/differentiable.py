"""The exchanges with gradients: one autograd Function per collective, whose backward is itself differentiable.

The loss is the sum of the ranks' losses. A backward pass exchanges too, so every rank must build the same graph and
run backward, empty ranks included: mask what does not count, never skip the call. Whether `x` requires a gradient is
therefore part of what the ranks must agree on.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.autograd import Function

from dist_attn.comm.base import Communicator

__all__ = ["all_gather", "all_reduce_sum", "all_to_all", "broadcast", "reduce_scatter_sum", "send_receive"]


def all_gather(comm: Communicator, x: Tensor, *, label: str = "") -> Tensor:
    """Every rank's `x`, in order of rank; backward sums each rank's gradients of it (reduce-scatter).

    Shapes: x [...] -> [P, ...].
    """
    return cast(Tensor, _AllGather.apply(x, comm, label))  # type: ignore[no-untyped-call]


def all_reduce_sum(comm: Communicator, x: Tensor, *, label: str = "") -> Tensor:
    """The sum of `x` over the ranks, on every rank; backward sums the gradients in the same way.

    Shapes: x [...] -> [...].
    """
    return cast(Tensor, _AllReduceSum.apply(x, comm, label))  # type: ignore[no-untyped-call]


def reduce_scatter_sum(comm: Communicator, x: Tensor, *, label: str = "") -> Tensor:
    """The sum over the ranks of their `x[rank]`; backward is an all-gather.

    Shapes: x [P, ...] -> [...].
    """
    return cast(Tensor, _ReduceScatterSum.apply(x, comm, label))  # type: ignore[no-untyped-call]


def all_to_all(
    comm: Communicator, x: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int], *, label: str = ""
) -> Tensor:
    """Rows of `x` to every rank, rows from every rank; backward sends the gradients back the same way.

    Shapes: x [sum(send_counts), ...] -> [sum(recv_counts), ...].
    """
    counts = (tuple(send_counts), tuple(recv_counts))
    return cast(Tensor, _AllToAll.apply(x, comm, *counts, label))  # type: ignore[no-untyped-call]


def send_receive(
    comm: Communicator, x: Tensor, send_counts: Mapping[int, int], recv_counts: Mapping[int, int], *, label: str = ""
) -> Tensor:
    """Rows of `x` to some ranks, rows from some; backward sends the gradients back the same way.

    Shapes: x [sum of send_counts, ...] -> [sum of recv_counts, ...].
    """
    return cast(Tensor, _SendReceive.apply(x, comm, dict(send_counts), dict(recv_counts), label))  # type: ignore[no-untyped-call]


def broadcast(comm: Communicator, x: Tensor, source: int, *, label: str = "") -> Tensor:
    """The `x` of rank `source`; backward sums the gradients there and is zero elsewhere.

    Shapes: x [...] -> [...].
    """
    return cast(Tensor, _Broadcast.apply(x, comm, source, label))  # type: ignore[no-untyped-call]


class _Context(Protocol):
    """The part of autograd's context that is used here, with what the forward pass leaves in it."""

    needs_input_grad: tuple[bool, ...]
    comm: Communicator
    label: str
    counts: tuple[tuple[int, ...], tuple[int, ...]] | tuple[dict[int, int], dict[int, int]]
    source: int


def _remember(ctx: _Context, comm: Communicator, label: str) -> str:
    """Keep what backward needs; the label under which the forward exchange is compared between ranks."""
    ctx.comm, ctx.label = comm, f"{label} backward".strip()
    return f"{label} with gradient".strip() if ctx.needs_input_grad[0] else label


class _AllGather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator, label: str) -> Tensor:
        return comm.all_gather(x, label=_remember(ctx, comm, label))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return reduce_scatter_sum(ctx.comm, grad, label=ctx.label), None, None


class _AllReduceSum(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator, label: str) -> Tensor:
        return comm.all_reduce_sum(x, label=_remember(ctx, comm, label))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return all_reduce_sum(ctx.comm, grad, label=ctx.label), None, None


class _ReduceScatterSum(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator, label: str) -> Tensor:
        return comm.reduce_scatter_sum(x, label=_remember(ctx, comm, label))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return all_gather(ctx.comm, grad, label=ctx.label), None, None


class _AllToAll(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, comm: Communicator, send: tuple[int, ...], recv: tuple[int, ...], label: str
    ) -> Tensor:
        ctx.counts = (recv, send)
        return comm.all_to_all(x, send, recv, label=_remember(ctx, comm, label))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return all_to_all(ctx.comm, grad, *ctx.counts, label=ctx.label), None, None, None, None


class _SendReceive(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, comm: Communicator, send: dict[int, int], recv: dict[int, int], label: str
    ) -> Tensor:
        ctx.counts = (recv, send)
        return comm.send_receive(x, send, recv, label=_remember(ctx, comm, label))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return send_receive(ctx.comm, grad, *ctx.counts, label=ctx.label), None, None, None, None


class _Broadcast(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator, source: int, label: str) -> Tensor:
        ctx.source = source
        return comm.broadcast(x, source, label=_remember(ctx, comm, label))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        total = all_reduce_sum(ctx.comm, grad, label=ctx.label)
        here = torch.tensor(ctx.comm.rank == ctx.source, device=grad.device)
        return torch.where(here, total, torch.zeros_like(total)), None, None, None
