"""One step of a scan: messages to some ranks and from some, in a graph that every rank's backward pass goes through.

A rank without a part in a step makes the call all the same, and what it computes stays connected to it: by rows of
which there are none, so that no number changes.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch

from dist_attn.comm import Communicator
from dist_attn.comm import differentiable as collectives

__all__ = ["LABEL", "Finish", "connected", "from_one", "rows_of", "swap", "swap_start", "tied"]

LABEL = "carry"  # in the traffic log

Finish = Callable[[], tuple[torch.Tensor, torch.Tensor]]
"""Waits for an exchange: the messages of the ranks before this one, combined, and those of all ranks."""


def rows_of(messages: Sequence[torch.Tensor], previous: torch.Tensor) -> torch.Tensor:
    """The messages below each other, connected to the step that brought the rows `previous`.

    Shapes: n times [B, H, X], [m, B, H, X] -> [n, B, H, X].
    """
    return torch.cat([previous[:0], *(message[None] for message in messages)])


def connected(message_BHX: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The message, connected to the step that brought the rows; their width may be another."""
    none = rows[:0].reshape(0)
    return torch.cat([message_BHX.reshape(-1), none]).reshape(message_BHX.shape)


def tied(x: torch.Tensor, exchanged: torch.Tensor) -> torch.Tensor:
    """`x` itself, whose backward pass goes through that of an exchange, although nothing of it is in `x`."""
    return cast(torch.Tensor, _Tied.apply(x, exchanged))  # type: ignore[no-untyped-call]


class _Tied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, exchanged: torch.Tensor) -> torch.Tensor:
        ctx.exchanged = exchanged.shape, exchanged.dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        shape, dtype = ctx.exchanged
        return grad, grad.new_zeros(shape, dtype=dtype)


def swap(comm: Communicator, message_BHX: torch.Tensor, partner: int) -> torch.Tensor:
    """This rank's message for that of `partner`; the identity where there is no such rank."""
    counts = _counts(comm, partner)
    return from_one(collectives.send_receive(comm, _row(message_BHX, counts), counts, counts, label=LABEL))


def swap_start(comm: Communicator, message_BHX: torch.Tensor, partner: int) -> collectives.Launched | collectives.Done:
    """Launch a `swap`; `from_one` makes a message of what the wait gives."""
    counts = _counts(comm, partner)
    return collectives.send_receive_start(comm, _row(message_BHX, counts), counts, counts, label=LABEL)


def from_one(rows: torch.Tensor) -> torch.Tensor:
    """The message in one row, the identity where there is none.

    Shapes: [1 or 0, B, H, X] -> [B, H, X].
    """
    return rows.sum(0)


def _counts(comm: Communicator, partner: int) -> dict[int, int]:
    return {partner: 1} if 0 <= partner < comm.size else {}


def _row(message_BHX: torch.Tensor, counts: Mapping[int, int]) -> torch.Tensor:
    return message_BHX[None][: len(counts)]
