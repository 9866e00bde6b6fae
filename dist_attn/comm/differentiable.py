"""The exchanges with gradients: one autograd Function for all of them, whose backward is itself differentiable.

The loss is the sum of the ranks' losses. A backward pass exchanges too, so every rank must build the same graph and
run backward, empty ranks included: mask what does not count, never skip the call. Whether `x` requires a gradient is
therefore part of what the ranks must agree on.

A launched exchange is two Functions with the local work between them: the backward pass of its wait launches the
transposed exchange, the backward pass of its launch waits for it. autograd goes through nodes in the reverse of the
order in which they were made, so what lies between them forward lies between them backward too.

In a graph that is being compiled an exchange is one registered operator, which the compiler does not look into. A graph
holds numbers and tensors only, so a communicator goes in as its number. Nothing is launched early there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast, final

import torch
from torch import Tensor
from torch.autograd import Function

from dist_attn.comm.base import Communicator
from dist_attn.comm.call import Pending

# The gradient of a broadcast is the sum of all ranks' gradients at its source, zeros elsewhere: "sum_at_source".
Kind = Literal[
    "all_gather", "reduce_scatter_sum", "all_reduce_sum", "all_to_all", "send_receive", "broadcast", "sum_at_source"
]
_BACKWARD: dict[Kind, Kind] = {
    "all_gather": "reduce_scatter_sum",
    "reduce_scatter_sum": "all_gather",
    "all_reduce_sum": "all_reduce_sum",
    "all_to_all": "all_to_all",
    "send_receive": "send_receive",
    "broadcast": "sum_at_source",
    "sum_at_source": "broadcast",
}


@dataclass(frozen=True)
class _Exchange:
    """One exchange by its name: counts of rows per rank, of `send_receive` rank, count, rank, count, …

    The one count of a broadcast is its source.
    """

    kind: Kind
    send: tuple[int, ...] = ()
    recv: tuple[int, ...] = ()

    @property
    def transposed(self) -> "_Exchange":
        """The exchange of the gradients."""
        return _Exchange(_BACKWARD[self.kind], self.recv, self.send)

    def run(self, comm: Communicator, x: Tensor, label: str) -> Tensor:
        """Run the exchange without gradients."""
        match self.kind:
            case "all_to_all":
                return comm.all_to_all(x, self.send, self.recv, label=label)
            case "send_receive":
                return comm.send_receive(x, _by_rank(self.send), _by_rank(self.recv), label=label)
            case "broadcast":
                return comm.broadcast(x, self.send[0], label=label)
            case "all_gather":
                return comm.all_gather(x, label=label)
            case "reduce_scatter_sum":
                return comm.reduce_scatter_sum(x, label=label)
        total = comm.all_reduce_sum(x, label=label)
        return torch.zeros_like(total) if self.kind == "sum_at_source" and comm.rank != self.recv[0] else total

    def launch(self, comm: Communicator, x: Tensor, label: str) -> Pending:
        """Launch the exchange, if it is one of those that are launched."""
        if self.kind == "send_receive":
            return comm.send_receive_start(x, _by_rank(self.send), _by_rank(self.recv), label=label)
        return (comm.all_gather_start if self.kind == "all_gather" else comm.reduce_scatter_sum_start)(x, label=label)

    def shape(self, shape: Sequence[int], ranks: int) -> tuple[int, ...]:
        """Compute the shape of the result of a tensor of that shape."""
        match self.kind:
            case "all_gather":
                return (ranks, *shape)
            case "reduce_scatter_sum":
                return tuple(shape[1:])
            case "all_to_all":
                return (sum(self.recv), *shape[1:])
            case "send_receive":
                return (sum(self.recv[1::2]), *shape[1:])
        return tuple(shape)


def _by_rank(counts: Sequence[int]) -> dict[int, int]:
    return dict(zip(counts[::2], counts[1::2], strict=True))


def _rows(send: Mapping[int, int], recv: Mapping[int, int]) -> _Exchange:
    flat = (tuple(number for pair in counts.items() for number in pair) for counts in (send, recv))
    return _Exchange("send_receive", *flat)


def all_gather(comm: Communicator, x: Tensor, *, label: str = "") -> Tensor:
    """Gather every rank's `x`, in order of rank; backward sums each rank's gradients of it (reduce-scatter).

    Shapes: x [...] -> [P, ...].
    """
    return _exchanged(comm, _Exchange("all_gather"), x, label)


def all_reduce_sum(comm: Communicator, x: Tensor, *, label: str = "") -> Tensor:
    """Sum `x` over the ranks, on every rank; backward sums the gradients in the same way.

    Shapes: x [...] -> [...].
    """
    return _exchanged(comm, _Exchange("all_reduce_sum"), x, label)


def reduce_scatter_sum(comm: Communicator, x: Tensor, *, label: str = "") -> Tensor:
    """Sum over the ranks their `x[rank]`; backward is an all-gather.

    Shapes: x [P, ...] -> [...].
    """
    return _exchanged(comm, _Exchange("reduce_scatter_sum"), x, label)


def all_to_all(
    comm: Communicator, x: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int], *, label: str = ""
) -> Tensor:
    """Send rows of `x` to every rank, and receive rows from every rank; backward sends the gradients back the same way.

    Shapes: x [sum(send_counts), ...] -> [sum(recv_counts), ...].
    """
    return _exchanged(comm, _Exchange("all_to_all", tuple(send_counts), tuple(recv_counts)), x, label)


def send_receive(
    comm: Communicator, x: Tensor, send_counts: Mapping[int, int], recv_counts: Mapping[int, int], *, label: str = ""
) -> Tensor:
    """Send rows of `x` to some ranks, and receive rows from some; backward sends the gradients back the same way.

    Shapes: x [sum of send_counts, ...] -> [sum of recv_counts, ...].
    """
    return _exchanged(comm, _rows(send_counts, recv_counts), x, label)


def broadcast(comm: Communicator, x: Tensor, source: int, *, label: str = "") -> Tensor:
    """Give every rank the `x` of rank `source`; backward sums the gradients there and is zero elsewhere.

    Shapes: x [...] -> [...].
    """
    return _exchanged(comm, _Exchange("broadcast", (source,), (source,)), x, label)


def all_gather_start(comm: Communicator, x: Tensor, *, label: str = "") -> "Launched | FinishedExchange":
    """Launch an `all_gather`; its backward pass likewise launches and waits."""
    return _started(comm, _Exchange("all_gather"), x, label)


def send_receive_start(
    comm: Communicator, x: Tensor, send_counts: Mapping[int, int], recv_counts: Mapping[int, int], *, label: str = ""
) -> "Launched | FinishedExchange":
    """Launch a `send_receive`; its backward pass likewise launches and waits."""
    return _started(comm, _rows(send_counts, recv_counts), x, label)


def marked(comm: Communicator, x: Tensor, name: str) -> Tensor:
    """Return `x` itself, with a mark in the traffic log now, and one when its gradient comes back."""
    if torch.compiler.is_compiling():
        return x
    return cast(Tensor, _Marked.apply(x, comm, name))  # type: ignore[no-untyped-call]


@final
class Launched:
    """An exchange with gradients that is under way; wait for it once, on every rank."""

    def __init__(self, handle: Tensor, history: Tensor, flight: "_InFlight") -> None:
        self.handle, self._history, self._flight = handle, history, flight

    def wait(self) -> Tensor:
        """Return the result of the exchange, connected to what was sent."""
        return self.wait_from(self.handle)

    def wait_from(self, handle: Tensor) -> Tensor:
        """Wait with a handle that came back through autograd."""
        return cast(Tensor, _Wait.apply(handle, self._history, self._flight))  # type: ignore[no-untyped-call]


@final
class FinishedExchange:
    """An exchange that a compiled graph has done where it would have been launched."""

    def __init__(self, value: Tensor) -> None:
        self._value = value

    def wait(self) -> Tensor:
        """Return the result of the exchange."""
        return self._value


def _exchanged(comm: Communicator, exchange: _Exchange, x: Tensor, label: str) -> Tensor:
    if torch.compiler.is_compiling():
        kind, send, recv = exchange.kind, list(exchange.send), list(exchange.recv)
        return cast(Tensor, _in_graph(x, comm.number, comm.size, kind, send, recv, label))
    return cast(Tensor, _Run.apply(x, _history(x), comm, exchange, label))  # type: ignore[no-untyped-call]


def _started(comm: Communicator, exchange: _Exchange, x: Tensor, label: str) -> "Launched | FinishedExchange":
    if torch.compiler.is_compiling():
        return FinishedExchange(_exchanged(comm, exchange, x, label))
    return _launched(x, _InFlight(comm, exchange, label))


def _history(x: Tensor) -> Tensor:
    """Make an empty tensor with the history of `x`: kept for the backward pass in its place, it holds no memory."""
    return x.reshape(-1)[:0].clone()


def _on_history(grad: Tensor, history: Tensor) -> Tensor:
    """Connect a gradient to what the forward pass sent, where the backward pass is to be differentiated itself.

    A gradient may be a constant on one rank only, which a pass through the gradients' graph would then not go through.
    """
    if not torch.is_grad_enabled():
        return grad
    return torch.cat([grad.reshape(-1), history.to(grad.dtype)]).reshape(grad.shape)


def _backward_of(label: str) -> str:
    return f"{label} backward".strip()


def _compared_as(label: str, wants_gradient: bool) -> str:
    """Label an exchange for comparison between ranks: the label also says whether a gradient comes back."""
    return f"{label} with gradient".strip() if wants_gradient else label


class _Run(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, history: Tensor, comm: Communicator, exchange: _Exchange, label: str) -> Tensor:
        ctx.comm, ctx.exchange, ctx.label = comm, exchange, label
        ctx.save_for_backward(history)
        return exchange.run(comm, x, _compared_as(label, ctx.needs_input_grad[0]))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        grad = _on_history(grad, *ctx.saved_tensors)
        return _exchanged(ctx.comm, ctx.exchange.transposed, grad, _backward_of(ctx.label)), None, None, None, None


@final
class _InFlight:
    """One exchange from launch to wait, and the transposed one that the backward pass has launched."""

    def __init__(self, comm: Communicator, exchange: _Exchange, label: str) -> None:
        self.comm, self.exchange, self.label = comm, exchange, label
        self.pending: Pending | None = None
        self.back: Launched | None = None


def _launched(x: Tensor, flight: _InFlight) -> Launched:
    return Launched(cast(Tensor, _Start.apply(x, flight)), _history(x), flight)  # type: ignore[no-untyped-call]


class _Start(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, flight: _InFlight) -> Tensor:
        ctx.flight = flight
        label = _compared_as(flight.label, ctx.needs_input_grad[0])
        flight.pending = flight.exchange.launch(flight.comm, x, label)
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, handle: Tensor) -> Any:
        # The gradient of the handle is the handle of the transposed exchange, which the backward pass of the wait made.
        back = ctx.flight.back
        ctx.flight.back = None
        return back.wait_from(handle), None


class _Wait(Function):
    @staticmethod
    def forward(ctx: Any, handle: Tensor, history: Tensor, flight: _InFlight) -> Tensor:
        ctx.flight = flight
        ctx.save_for_backward(history)
        pending, flight.pending = flight.pending, None
        assert pending is not None  # launched before there was a handle
        # Not kept: the result leads to this node and the node to the flight, a circle that nobody would ever free.
        return pending.wait()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        flight: _InFlight = ctx.flight
        back = _InFlight(flight.comm, flight.exchange.transposed, _backward_of(flight.label))
        flight.back = _launched(_on_history(grad, *ctx.saved_tensors), back)
        return flight.back.handle, None, None


class _Marked(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator, name: str) -> Tensor:
        ctx.comm, ctx.label = comm, _backward_of(name)
        comm.traffic.mark(name)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return marked(ctx.comm, grad, ctx.label), None, None


@torch.library.custom_op("dist_attn::exchange", mutates_args=())
def _in_graph(x: Tensor, number: int, ranks: int, kind: str, send: list[int], recv: list[int], label: str) -> Tensor:
    exchange = _Exchange(cast(Kind, kind), tuple(send), tuple(recv))
    return exchange.run(Communicator.of_number(number), x.detach(), label)


@_in_graph.register_fake
def _(x: Tensor, number: int, ranks: int, kind: str, send: list[int], recv: list[int], label: str) -> Tensor:
    return x.new_empty(_Exchange(cast(Kind, kind), tuple(send), tuple(recv)).shape(x.shape, ranks))


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.number, ctx.ranks, ctx.kind, ctx.send, ctx.recv, ctx.label = inputs


def _backward(ctx: Any, grad: Tensor) -> Any:
    label, kind = _backward_of(ctx.label), _BACKWARD[ctx.kind]
    return _in_graph(grad, ctx.number, ctx.ranks, kind, ctx.recv, ctx.send, label), *[None] * 6


_in_graph.register_autograd(_backward, setup_context=_remember)
