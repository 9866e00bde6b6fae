"""The back end's exclusive scan with gradients: the backward pass is the same scan, from the last rank to the first.

A message is a row of decayed sums N, the log decay a, and numbers b that are only added (none in a state). With
P[0] = 0 and P[r + 1] = combine(P[r], x[r]), rank r's result is P[r]. If g[r] is its gradient, the one that P[r + 1]
gets from all later ranks is

    H.N[r] = g.N[r + 1] + exp(a[r + 1]) H.N[r + 1]      H.a[r] = g.a[r + 1] + H.a[r + 1]      H.b likewise,

which is the exclusive scan of (g.N, a; g.a, g.b), counted from the last rank, and the gradients of x[r] are

    dN = H.N      da = H.a + sum_n H.N exp(a) P.N      db = H.b.

They are made of plain operations and of that scan, so that they have gradients themselves.
"""

from functools import partial
from typing import Any, cast, final

import torch
from torch.autograd import Function

from dist_attn.comm import Communicator, Pending
from dist_attn.comm import differentiable as collectives
from dist_attn.sharded.prefix_scan.element import combine

__all__ = ["Running", "before_start"]


def before_start(comm: Communicator, x_BHX: torch.Tensor, *, label: str = "") -> "Running | collectives.Done":
    """Launch the scan of the elements before this rank; its backward pass likewise launches and waits."""
    if torch.compiler.is_compiling():
        return collectives.Done(_in_graph(x_BHX, comm.number, 0, False, label))
    return _start(x_BHX, _Flight(comm, label))


@final
class Running:
    """A scan with gradients that is under way; wait for it once, on every rank."""

    def __init__(self, token: torch.Tensor, x_BHX: torch.Tensor, flight: "_Flight") -> None:
        self._token, self._x_BHX, self._flight = token, x_BHX, flight

    @property
    def token(self) -> torch.Tensor:
        """Nothing, connected to the launch."""
        return self._token

    def wait(self) -> torch.Tensor:
        """The elements before this rank, combined, connected to what was sent."""
        return self.wait_from(self._token)

    def wait_from(self, token: torch.Tensor) -> torch.Tensor:
        """`wait`, for a token that came back through autograd."""
        return cast(torch.Tensor, _Wait.apply(token, self._x_BHX, self._flight))  # type: ignore[no-untyped-call]


@final
class _Flight:
    """One scan from launch to wait, and the one from the last rank that its backward pass has launched."""

    def __init__(self, comm: Communicator, label: str, added: int = 0, reverse: bool = False) -> None:
        self.comm, self.label, self.added, self.reverse = comm, label, added, reverse
        self.pending: Pending | None = None
        self.back: Running | None = None
        self.before: torch.Tensor | None = None

    def transposed(self) -> "_Flight":
        return _Flight(self.comm, f"{self.label} backward".strip(), self.added + 1, not self.reverse)


def _start(x_BHX: torch.Tensor, flight: _Flight) -> Running:
    return Running(cast(torch.Tensor, _Start.apply(x_BHX, flight)), x_BHX, flight)  # type: ignore[no-untyped-call]


class _Start(Function):
    @staticmethod
    def forward(ctx: Any, x_BHX: torch.Tensor, flight: _Flight) -> torch.Tensor:
        ctx.flight = flight
        ctx.save_for_backward(x_BHX)
        label = f"{flight.label} with gradient".strip() if ctx.needs_input_grad[0] else flight.label
        operator = partial(combine, added=flight.added)
        flight.pending = flight.comm.exclusive_scan_start(x_BHX, operator, reverse=flight.reverse, label=label)
        return x_BHX.new_empty(0)

    @staticmethod
    def backward(ctx: Any, token: torch.Tensor) -> Any:
        # The gradient of the token is the token of the scan that the backward pass of the wait has launched.
        flight, (x_BHX,) = ctx.flight, ctx.saved_tensors
        (back, flight.back), (before_BHX, flight.before) = (flight.back, None), (flight.before, None)
        return _gradient(x_BHX, before_BHX, back.wait_from(token), flight.added), None


class _Wait(Function):
    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, x_BHX: torch.Tensor, flight: _Flight) -> torch.Tensor:
        ctx.flight = flight
        pending, flight.pending = flight.pending, None
        assert pending is not None  # launched before there was a token
        before_BHX = pending.wait()
        ctx.save_for_backward(x_BHX, before_BHX)
        return before_BHX

    @staticmethod
    def backward(ctx: Any, grad_BHX: torch.Tensor) -> Any:
        x_BHX, before_BHX = ctx.saved_tensors
        flight = ctx.flight
        flight.before = before_BHX
        flight.back = _start(_transposed(grad_BHX, x_BHX, flight.added), flight.transposed())
        return flight.back.token, None, None


def _transposed(grad_BHX: torch.Tensor, x_BHX: torch.Tensor, added: int) -> torch.Tensor:
    """What a rank brings to the scan of gradients: (g.N, a; g.a, g.b), connected to `x` whatever the gradient is."""
    sums = grad_BHX.shape[-1] - 1 - added
    return torch.cat([grad_BHX[..., :sums], x_BHX[..., sums : sums + 1], grad_BHX[..., sums:]], dim=-1)


def _gradient(x_BHX: torch.Tensor, before_BHX: torch.Tensor, later_BHX: torch.Tensor, added: int) -> torch.Tensor:
    """(dN, da, db) of `x` from what the scan of gradients brings."""
    sums = x_BHX.shape[-1] - 1 - added
    later_BHN, _, later_BH1, added_BHA = later_BHX.split((sums, 1, 1, added), dim=-1)
    kept_BHN = before_BHX[..., :sums] * x_BHX[..., sums : sums + 1].exp()
    decay_BH1 = later_BH1 + (later_BHN * kept_BHN).sum(-1, keepdim=True)
    return torch.cat([later_BHN, decay_BH1, added_BHA], dim=-1)


@torch.library.custom_op("dist_attn::exclusive_scan", mutates_args=())
def _in_graph(x_BHX: torch.Tensor, number: int, added: int, reverse: bool, label: str) -> torch.Tensor:
    """The scan as one node of a graph that is being compiled."""
    operator = partial(combine, added=added)
    comm = Communicator.of_number(number)
    return comm.exclusive_scan_start(x_BHX.detach(), operator, reverse=reverse, label=label).wait()


@_in_graph.register_fake
def _(x_BHX: torch.Tensor, number: int, added: int, reverse: bool, label: str) -> torch.Tensor:
    return x_BHX.new_empty(x_BHX.shape)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x_BHX, ctx.number, ctx.added, ctx.reverse, ctx.label = inputs
    ctx.save_for_backward(x_BHX, output)


def _backward(ctx: Any, grad_BHX: torch.Tensor) -> Any:
    x_BHX, before_BHX = ctx.saved_tensors
    sent_BHX = _transposed(grad_BHX, x_BHX, ctx.added)
    label = f"{ctx.label} backward".strip()
    later_BHX = _in_graph(sent_BHX, ctx.number, ctx.added + 1, not ctx.reverse, label)
    return _gradient(x_BHX, before_BHX, later_BHX, ctx.added), None, None, None, None


_in_graph.register_autograd(_backward, setup_context=_remember)
