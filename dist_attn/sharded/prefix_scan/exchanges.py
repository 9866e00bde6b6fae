"""Exchanges of one level whose message is a whole element: pair, gather, exscan, log_step and serial_ring.

One step of an exchange is messages to some ranks and from some, in a graph that every rank's backward pass goes
through. A rank without a part in a step makes the call all the same, and what it computes stays connected to it: by
rows of which there are none, so that no number changes.

Shape letters: X numbers of a message; what is said of [B, H, X] holds for any leading dimensions.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from dist_attn.comm import Communicator
from dist_attn.comm import differentiable as collectives
from dist_attn.errors import ConfigError
from dist_attn.ops.monoid import Monoid
from dist_attn.sharded.prefix_scan.scan_gradient import before_start

LABEL = "carry"  # in the traffic log

Finish = Callable[[], tuple[torch.Tensor, torch.Tensor]]
"""Waits for an exchange: the messages of the ranks before this one, combined, and those of all ranks."""


def rows_of(messages: Sequence[torch.Tensor], previous: torch.Tensor) -> torch.Tensor:
    """The messages below each other, connected to the step that brought the rows `previous`.

    Shapes: n times [B, H, X], [m, B, H, X] -> [n, B, H, X].
    """
    return torch.cat([previous[:0], *(message[None] for message in messages)])


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


def _start_swap(comm: Communicator, message_BHX: torch.Tensor, partner: int) -> Callable[[], torch.Tensor]:
    """Launch the swap of this rank's message for that of `partner`; waiting gives that one.

    It is the identity where there is no such rank.
    """
    counts = _counts(comm, partner)
    launched = collectives.send_receive_start(comm, message_BHX[None][: len(counts)], counts, counts, label=LABEL)
    return lambda: launched.wait().sum(0)


def _counts(comm: Communicator, partner: int) -> dict[int, int]:
    return {partner: 1} if 0 <= partner < comm.size else {}


def start_pair(comm: Communicator, monoid: Monoid, element_BHX: torch.Tensor) -> Finish:
    """The scan of two ranks: each sends the other its element.

    Launch the exchange; waiting gives the elements before this rank, combined, and those of both ranks.

    Cost: |x| bytes in 1 message, 1 step; backward the same.
    Raises: ConfigError for another number of ranks than two.
    """
    if comm.size != 2:
        raise ConfigError(f"the exchange `pair` is for 2 ranks, there are {comm.size}; use `gather` or `log_step`")
    swapped = _start_swap(comm, element_BHX, 1 - comm.rank)

    def finish() -> tuple[torch.Tensor, torch.Tensor]:
        other_BHX = swapped()
        if comm.rank == 0:
            return torch.zeros_like(element_BHX), monoid.combine(element_BHX, other_BHX)
        return other_BHX, monoid.combine(other_BHX, element_BHX)

    return finish


def start_gather(comm: Communicator, monoid: Monoid, element_BHX: torch.Tensor) -> Finish:
    """One all-gather: every rank gets all elements and folds them from the first to the last.

    Launch the exchange; waiting gives the elements before this rank, combined, and those of all ranks.

    The fold has the same order on every rank, so every rank computes the same total, bit for bit.

    Cost: (P - 1) |x| bytes in P - 1 messages, the whole exchange launched at once; backward a reduce-scatter of the
        same bytes. P elements in memory.
    """
    launched = collectives.all_gather_start(comm, element_BHX, label=LABEL)

    def finish() -> tuple[torch.Tensor, torch.Tensor]:
        prefixes = [torch.zeros_like(element_BHX)]
        for one_BHX in launched.wait().unbind(0):
            prefixes.append(monoid.combine(prefixes[-1], one_BHX))
        return prefixes[comm.rank], prefixes[-1]

    return finish


def start_exscan(comm: Communicator, monoid: Monoid, element_BHX: torch.Tensor) -> Finish:
    """The scan that a back end offers itself: over MPI one `Iexscan` with the combine of states as its operator.

    Launch the scan; waiting gives the elements before this rank, combined, and those of all ranks.

    An exclusive scan leaves out the last element: the last rank adds it and sends the total to all, so that all have
    the same bits. MPI may combine in any order that keeps the ranks' order: other exchanges give the same to rounding.

    Cost: |x| bytes in 1 message from each rank but the last, (P - 1) |x| in P - 1 messages from the last; MPI's own
        messages, about log2 P of |x| in as many steps, are not to be seen. Over other back ends P - 1 steps. Backward
        an all-reduce of |x| and a scan from the last rank of |x| and one number more in each row.
    """
    running = before_start(comm, monoid, element_BHX, label=LABEL)

    def finish() -> tuple[torch.Tensor, torch.Tensor]:
        before_BHX = running.wait()
        total_BHX = monoid.combine(before_BHX, element_BHX)
        return before_BHX, collectives.broadcast(comm, total_BHX, comm.size - 1, label=LABEL)

    return finish


def start_log_step(comm: Communicator, monoid: Monoid, element_BHX: torch.Tensor) -> Finish:
    """Recursive doubling: in step k each rank swaps the total of its block of 2^k ranks with the next block's.

    Launch the first step; waiting does the others and gives the elements before this rank and of all, combined.

    Where P is not a power of two the upper blocks have gaps, and some ranks have no whole total: all get it from the
    last rank, which always has it.

    Cost: ceil(log2 P) steps, |x| bytes in 1 message in each step in which rank ^ 2^k is a rank; unless P is a power of
        two, also a broadcast of |x| from the last rank. Backward the same, the broadcast an all-reduce.
    Reference: Hillis and Steele, Data Parallel Algorithms (1986); the form for any operator that need not commute is
        that of MPI_Scan over recursive doubling.
    """
    swapped = _start_swap(comm, element_BHX, comm.rank ^ 1)

    def finish() -> tuple[torch.Tensor, torch.Tensor]:
        before_BHX, block_BHX = torch.zeros_like(element_BHX), element_BHX
        distance = 1
        received_BHX = swapped()
        while True:
            if comm.rank & distance:
                before_BHX = monoid.combine(received_BHX, before_BHX)
                block_BHX = monoid.combine(received_BHX, block_BHX)
            else:
                block_BHX = monoid.combine(block_BHX, received_BHX)
            distance *= 2
            if distance >= comm.size:
                break
            counts = _counts(comm, comm.rank ^ distance)
            rows = collectives.send_receive(comm, block_BHX[None][: len(counts)], counts, counts, label=LABEL)
            received_BHX = rows.sum(0)
        if comm.size & (comm.size - 1):
            block_BHX = collectives.broadcast(comm, block_BHX, comm.size - 1, label=LABEL)
        return before_BHX, block_BHX

    return finish


def start_serial_ring(comm: Communicator, monoid: Monoid, element_BHX: torch.Tensor) -> Finish:
    """The scan as it is defined, one rank after the other: the oracle of the other exchanges.

    Launch nothing; waiting gives the elements before this rank, combined, and those of all ranks.

    Cost: P - 1 steps of |x| bytes, of which each rank but the last sends one, then a broadcast from the last.
    """

    def finish() -> tuple[torch.Tensor, torch.Tensor]:
        before_BHX = torch.zeros_like(element_BHX)
        for sender in range(comm.size - 1):
            message_BHX = monoid.combine(before_BHX, element_BHX)
            send = {sender + 1: 1} if comm.rank == sender else {}
            recv = {sender: 1} if comm.rank == sender + 1 else {}
            rows = collectives.send_receive(comm, message_BHX[None][: len(send)], send, recv, label=LABEL)
            before_BHX = before_BHX + rows.sum(0)
        total_BHX = monoid.combine(before_BHX, element_BHX)
        return before_BHX, collectives.broadcast(comm, total_BHX, comm.size - 1, label=LABEL)

    return finish
