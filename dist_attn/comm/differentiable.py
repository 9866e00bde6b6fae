"""The exchanges with gradients: one autograd Function per collective, whose backward is itself differentiable.

The loss is the sum of the ranks' losses. A backward pass exchanges too, so every rank must build the same graph and
run backward, empty ranks included: mask what does not count, never skip the call. Whether `x` requires a gradient is
therefore part of what the ranks must agree on.

A launched exchange is two Functions with the local work between them: the backward pass of its wait launches the
transposed exchange, the backward pass of its launch waits for it. autograd goes through nodes in the reverse of the
order in which they were made, so what lies between them forward lies between them backward too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast, final

import torch
from torch import Tensor
from torch.autograd import Function

from dist_attn.comm.base import Communicator
from dist_attn.comm.call import Pending
from dist_attn.comm.compiled import compiled_exchange

__all__ = [
    "Done",
    "Launched",
    "all_gather",
    "all_gather_start",
    "all_reduce_sum",
    "all_to_all",
    "broadcast",
    "marked",
    "reduce_scatter_sum",
    "send_receive",
    "send_receive_start",
]


def all_gather(comm: Communicator, x: Tensor, *, label: str = "") -> Tensor:
    """Every rank's `x`, in order of rank; backward sums each rank's gradients of it (reduce-scatter).

    Shapes: x [...] -> [P, ...].
    """
    if torch.compiler.is_compiling():
        return compiled_exchange(comm, "all_gather", x, label=label)
    return cast(Tensor, _AllGather.apply(x, comm, label))  # type: ignore[no-untyped-call]


def all_reduce_sum(comm: Communicator, x: Tensor, *, label: str = "") -> Tensor:
    """The sum of `x` over the ranks, on every rank; backward sums the gradients in the same way.

    Shapes: x [...] -> [...].
    """
    if torch.compiler.is_compiling():
        return compiled_exchange(comm, "all_reduce_sum", x, label=label)
    return cast(Tensor, _AllReduceSum.apply(x, comm, label))  # type: ignore[no-untyped-call]


def reduce_scatter_sum(comm: Communicator, x: Tensor, *, label: str = "") -> Tensor:
    """The sum over the ranks of their `x[rank]`; backward is an all-gather.

    Shapes: x [P, ...] -> [...].
    """
    if torch.compiler.is_compiling():
        return compiled_exchange(comm, "reduce_scatter_sum", x, label=label)
    return cast(Tensor, _ReduceScatterSum.apply(x, comm, label))  # type: ignore[no-untyped-call]


def all_to_all(
    comm: Communicator, x: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int], *, label: str = ""
) -> Tensor:
    """Rows of `x` to every rank, rows from every rank; backward sends the gradients back the same way.

    Shapes: x [sum(send_counts), ...] -> [sum(recv_counts), ...].
    """
    if torch.compiler.is_compiling():
        return compiled_exchange(comm, "all_to_all", x, send_counts, recv_counts, label=label)
    counts = (tuple(send_counts), tuple(recv_counts))
    return cast(Tensor, _AllToAll.apply(x, comm, *counts, label))  # type: ignore[no-untyped-call]


def send_receive(
    comm: Communicator, x: Tensor, send_counts: Mapping[int, int], recv_counts: Mapping[int, int], *, label: str = ""
) -> Tensor:
    """Rows of `x` to some ranks, rows from some; backward sends the gradients back the same way.

    Shapes: x [sum of send_counts, ...] -> [sum of recv_counts, ...].
    """
    if torch.compiler.is_compiling():
        return compiled_exchange(comm, "send_receive", x, send_counts, recv_counts, label=label)
    counts = (dict(send_counts), dict(recv_counts))
    return cast(Tensor, _SendReceive.apply(x, _thread(x), comm, *counts, label))  # type: ignore[no-untyped-call]


def broadcast(comm: Communicator, x: Tensor, source: int, *, label: str = "") -> Tensor:
    """The `x` of rank `source`; backward sums the gradients there and is zero elsewhere.

    Shapes: x [...] -> [...].
    """
    if torch.compiler.is_compiling():
        return compiled_exchange(comm, "broadcast", x, [source], [source], label=label)
    return cast(Tensor, _Broadcast.apply(x, comm, source, label))  # type: ignore[no-untyped-call]


def all_gather_start(comm: Communicator, x: Tensor, *, label: str = "") -> "Launched | Done":
    """Launch an `all_gather`; its backward pass likewise launches and waits."""
    if torch.compiler.is_compiling():
        return Done(all_gather(comm, x, label=label))
    return _start(x, _Gather(comm, label))


def send_receive_start(
    comm: Communicator, x: Tensor, send_counts: Mapping[int, int], recv_counts: Mapping[int, int], *, label: str = ""
) -> "Launched | Done":
    """Launch a `send_receive`; its backward pass likewise launches and waits."""
    if torch.compiler.is_compiling():
        return Done(send_receive(comm, x, send_counts, recv_counts, label=label))
    return _start(x, _Rows(comm, label, dict(send_counts), dict(recv_counts)))


def marked(comm: Communicator, x: Tensor, name: str) -> Tensor:
    """`x` itself, with a mark in the traffic log now, and one when its gradient comes back."""
    if torch.compiler.is_compiling():
        return x
    return cast(Tensor, _Marked.apply(x, comm, name))  # type: ignore[no-untyped-call]


@final
class Launched:
    """An exchange with gradients that is under way; wait for it once, on every rank."""

    def __init__(self, token: Tensor, thread: Tensor, flight: "_Flight") -> None:
        self.token, self._thread, self._flight = token, thread, flight

    def wait(self) -> Tensor:
        """What the exchange brings, connected to what was sent."""
        return self.wait_from(self.token)

    def wait_from(self, token: Tensor) -> Tensor:
        """`wait`, for a token that came back through autograd."""
        return cast(Tensor, _Wait.apply(token, self._thread, self._flight))  # type: ignore[no-untyped-call]


@final
class Done:
    """An exchange that a compiled graph has done where it would have been launched."""

    def __init__(self, value: Tensor) -> None:
        self._value = value

    def wait(self) -> Tensor:
        """What the exchange has brought."""
        return self._value


class _Context(Protocol):
    """The part of autograd's context that is used here, with what the forward pass leaves in it."""

    needs_input_grad: tuple[bool, ...]
    comm: Communicator
    label: str
    counts: tuple[tuple[int, ...], tuple[int, ...]] | tuple[dict[int, int], dict[int, int]]
    source: int


def _thread(x: Tensor) -> Tensor:
    """Nothing, connected to `x`: kept for the backward pass in its place, it holds no memory."""
    return x.reshape(-1)[:0].clone()


def _on_thread(grad: Tensor, thread: Tensor) -> Tensor:
    """The gradient, connected to what the forward pass sent, where the backward pass is to be differentiated itself.

    A gradient may be a constant on one rank only, which a pass through the gradients' graph would then not go through.
    """
    if not torch.is_grad_enabled():
        return grad
    return torch.cat([grad.reshape(-1), thread.to(grad.dtype)]).reshape(grad.shape)


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
        ctx: Any,
        x: Tensor,
        thread: Tensor,
        comm: Communicator,
        send: dict[int, int],
        recv: dict[int, int],
        label: str,
    ) -> Tensor:
        ctx.counts = (recv, send)
        ctx.save_for_backward(thread)
        return comm.send_receive(x, send, recv, label=_remember(ctx, comm, label))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        grad = _on_thread(grad, *ctx.saved_tensors)
        return send_receive(ctx.comm, grad, *ctx.counts, label=ctx.label), None, None, None, None, None


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


@dataclass(frozen=True)
class _Gather:
    comm: Communicator
    label: str

    def launch(self, x: Tensor, label: str) -> Pending:
        return self.comm.all_gather_start(x, label=label)

    def transposed(self) -> "_Exchange":
        return _Scatter(self.comm, f"{self.label} backward".strip())


@dataclass(frozen=True)
class _Scatter:
    comm: Communicator
    label: str

    def launch(self, x: Tensor, label: str) -> Pending:
        return self.comm.reduce_scatter_sum_start(x, label=label)

    def transposed(self) -> "_Exchange":
        return _Gather(self.comm, f"{self.label} backward".strip())


@dataclass(frozen=True)
class _Rows:
    comm: Communicator
    label: str
    send: dict[int, int]
    recv: dict[int, int]

    def launch(self, x: Tensor, label: str) -> Pending:
        return self.comm.send_receive_start(x, self.send, self.recv, label=label)

    def transposed(self) -> "_Exchange":
        return _Rows(self.comm, f"{self.label} backward".strip(), self.recv, self.send)


_Exchange = _Gather | _Scatter | _Rows


@final
class _Flight:
    """One exchange from launch to wait, and the transposed one that the backward pass has launched."""

    def __init__(self, exchange: _Exchange) -> None:
        self.exchange = exchange
        self.pending: Pending | None = None
        self.back: Launched | None = None


def _start(x: Tensor, exchange: _Exchange) -> Launched:
    flight = _Flight(exchange)
    return Launched(cast(Tensor, _Start.apply(x, flight)), _thread(x), flight)  # type: ignore[no-untyped-call]


class _Start(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, flight: _Flight) -> Tensor:
        ctx.flight = flight
        label = flight.exchange.label
        flight.pending = flight.exchange.launch(
            x, f"{label} with gradient".strip() if ctx.needs_input_grad[0] else label
        )
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, token: Tensor) -> Any:
        # The gradient of the token is the token of the transposed exchange, which the backward pass of the wait made.
        back = ctx.flight.back
        ctx.flight.back = None
        return back.wait_from(token), None


class _Wait(Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, thread: Tensor, flight: _Flight) -> Tensor:
        ctx.flight = flight
        ctx.save_for_backward(thread)
        pending, flight.pending = flight.pending, None
        assert pending is not None  # launched before there was a token
        # Not kept: the result leads to this node and the node to the flight, a circle that nobody would ever free.
        return pending.wait()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.flight.back = _start(_on_thread(grad, *ctx.saved_tensors), ctx.flight.exchange.transposed())
        return ctx.flight.back.token, None, None


class _Marked(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator, name: str) -> Tensor:
        ctx.comm, ctx.label = comm, f"{name} backward"
        comm.traffic.mark(name)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return marked(ctx.comm, grad, ctx.label), None, None
