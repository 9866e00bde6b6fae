"""The back end's exclusive scan with gradients: the backward pass is the same scan, from the last rank to the first.

What travels in the backward pass, and what follows from it, says `ops.monoid.Monoid`. It is made of plain operations
and of that scan, so that it has gradients itself.
"""

from typing import Any, cast, final

import torch
from torch.autograd import Function

from dist_attn.comm import Communicator, Pending
from dist_attn.comm import differentiable as collectives
from dist_attn.ops.monoid import Monoid, monoid_named, pulled_back

__all__ = ["Running", "before_start"]


def before_start(
    comm: Communicator, monoid: Monoid, x_BHX: torch.Tensor, *, label: str = ""
) -> "Running | collectives.FinishedExchange":
    """Launch the scan of the elements before this rank; its backward pass likewise launches and waits."""
    if torch.compiler.is_compiling():
        return collectives.FinishedExchange(
            _in_graph(x_BHX, list(monoid.known), comm.number, monoid.name, False, label)
        )
    return _start(x_BHX, _InFlight(comm, monoid, label))


@final
class Running:
    """A scan with gradients that is under way; wait for it once, on every rank."""

    def __init__(self, handle: torch.Tensor, x_BHX: torch.Tensor, flight: "_InFlight") -> None:
        self._handle, self._x_BHX, self._flight = handle, x_BHX, flight

    @property
    def handle(self) -> torch.Tensor:
        """Nothing, connected to the launch."""
        return self._handle

    def wait(self) -> torch.Tensor:
        """The elements before this rank, combined, connected to what was sent."""
        return self.wait_from(self._handle)

    def wait_from(self, handle: torch.Tensor) -> torch.Tensor:
        """`wait`, for a handle that came back through autograd."""
        return cast(torch.Tensor, _Wait.apply(handle, self._x_BHX, self._flight))  # type: ignore[no-untyped-call]


@final
class _InFlight:
    """One scan from launch to wait, and the one from the last rank that its backward pass has launched."""

    def __init__(self, comm: Communicator, monoid: Monoid, label: str, reverse: bool = False) -> None:
        self.comm, self.monoid, self.label, self.reverse = comm, monoid, label, reverse
        self.pending: Pending | None = None
        self.back: Running | None = None
        self.before: torch.Tensor | None = None

    def transposed(self) -> "_InFlight":
        return _InFlight(self.comm, self.monoid.transposed(), f"{self.label} backward".strip(), not self.reverse)


def _start(x_BHX: torch.Tensor, flight: _InFlight) -> Running:
    handle = _Start.apply(x_BHX, flight, *flight.monoid.known)  # type: ignore[no-untyped-call]
    return Running(cast(torch.Tensor, handle), x_BHX, flight)


class _Start(Function):
    @staticmethod
    def forward(ctx: Any, x_BHX: torch.Tensor, flight: _InFlight, *known: torch.Tensor) -> torch.Tensor:
        ctx.flight = flight
        ctx.save_for_backward(x_BHX)
        label = f"{flight.label} with gradient".strip() if ctx.needs_input_grad[0] else flight.label
        flight.pending = flight.comm.exclusive_scan_start(
            x_BHX, flight.monoid.combine, reverse=flight.reverse, label=label
        )
        return x_BHX.new_empty(0)

    @staticmethod
    def backward(ctx: Any, handle: torch.Tensor) -> Any:
        # The gradient of the handle is the handle of the scan that the backward pass of the wait has launched.
        flight, (x_BHX,) = ctx.flight, ctx.saved_tensors
        (back, flight.back), (before_BHX, flight.before) = (flight.back, None), (flight.before, None)
        of_x_BHX, *of_known = pulled_back(flight.monoid, x_BHX, before_BHX, back.wait_from(handle))
        return of_x_BHX, None, *of_known


class _Wait(Function):
    @staticmethod
    def forward(ctx: Any, handle: torch.Tensor, x_BHX: torch.Tensor, flight: _InFlight) -> torch.Tensor:
        ctx.flight = flight
        pending, flight.pending = flight.pending, None
        assert pending is not None  # launched before there was a handle
        before_BHX = pending.wait()
        ctx.save_for_backward(x_BHX, before_BHX)
        return before_BHX

    @staticmethod
    def backward(ctx: Any, grad_BHX: torch.Tensor) -> Any:
        x_BHX, before_BHX = ctx.saved_tensors
        flight = ctx.flight
        flight.before = before_BHX
        flight.back = _start(flight.monoid.backward_message(x_BHX, grad_BHX), flight.transposed())
        return flight.back.handle, None, None


@torch.library.custom_op("dist_attn::exclusive_scan", mutates_args=())
def _in_graph(
    x_BHX: torch.Tensor, known: list[torch.Tensor], number: int, monoid: str, reverse: bool, label: str
) -> torch.Tensor:
    """The scan as one node of a graph that is being compiled."""
    comm, combine = Communicator.of_number(number), monoid_named(monoid, [t.detach() for t in known]).combine
    return comm.exclusive_scan_start(x_BHX.detach(), combine, reverse=reverse, label=label).wait()


@_in_graph.register_fake
def _(
    x_BHX: torch.Tensor, known: list[torch.Tensor], number: int, monoid: str, reverse: bool, label: str
) -> torch.Tensor:
    return x_BHX.new_empty(x_BHX.shape)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x_BHX, known, ctx.number, ctx.monoid, ctx.reverse, ctx.label = inputs
    ctx.save_for_backward(x_BHX, output, *known)


def _backward(ctx: Any, grad_BHX: torch.Tensor) -> Any:
    x_BHX, before_BHX, *known = ctx.saved_tensors
    monoid = monoid_named(ctx.monoid, known)
    sent_BHX = monoid.backward_message(x_BHX, grad_BHX)
    label = f"{ctx.label} backward".strip()
    later_BHX = _in_graph(sent_BHX, known, ctx.number, monoid.transposed().name, not ctx.reverse, label)
    of_x_BHX, *of_known = pulled_back(monoid, x_BHX, before_BHX, later_BHX)
    return of_x_BHX, of_known, None, None, None, None


_in_graph.register_autograd(_backward, setup_context=_remember)
