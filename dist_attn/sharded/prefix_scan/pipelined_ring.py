"""The scan along a ring in pieces: while a rank adds its part to one piece, the next piece is on its way to it."""

import torch

from dist_attn.comm import Communicator
from dist_attn.comm import differentiable as collectives
from dist_attn.sharded.prefix_scan.monoid import Monoid, join_pieces, split_pieces
from dist_attn.sharded.prefix_scan.steps import LABEL, Finish, connected, rows_of

__all__ = ["start"]


def start(comm: Communicator, monoid: Monoid, element_BHX: torch.Tensor, pieces: int) -> Finish:
    """Launch the first step; waiting does the others and gives the elements before this rank and of all, combined.

    Piece k of the elements up to rank r leaves it in step r + k; the total turns round at the last rank and reaches
    rank r in step P - 1 + k + r.

    Cost: 2 P + pieces - 3 steps. A rank sends at most twice the element, cut in pieces that each carry the weights:
        4 B H (K ceil(n / pieces) + W) bytes a piece. Backward the same.
    """
    ring = _Ring(comm, monoid, element_BHX, pieces)
    ring.launch(0)

    def finish() -> tuple[torch.Tensor, torch.Tensor]:
        for step in range(2 * comm.size + pieces - 3):
            if step:
                ring.launch(step)
            ring.wait(step)
        return ring.results()

    return finish


class _Ring:
    """One rank's pieces, and which of them it sends and receives in each step."""

    def __init__(self, comm: Communicator, monoid: Monoid, element_BHX: torch.Tensor, pieces: int) -> None:
        self._comm, self._monoid, self._columns = comm, monoid, element_BHX.shape[-1]
        self._own = split_pieces(monoid, element_BHX, pieces)
        self._before = [torch.zeros_like(piece) for piece in self._own]
        self._total = [torch.zeros_like(piece) for piece in self._own]
        self._previous = torch.stack(self._own)
        self._launched: collectives.Launched | collectives.Done | None = None

    def launch(self, step: int) -> None:
        rank, size = self._comm.rank, self._comm.size
        messages = []
        up_to = _index(step - rank, self._own)
        if up_to is not None:  # the last rank's sum up to itself is the total
            messages.append(self._monoid.combine(self._before[up_to], self._own[up_to]))
            if rank == size - 1:
                self._total[up_to] = messages[-1]
        whole = _index(step - size - rank, self._own)
        if whole is not None and rank < size - 2:
            messages.append(self._total[whole])
        send = {(rank + 1) % size: len(messages)} if messages else {}
        expected = sum(piece is not None for piece in self._expected(step))
        recv = {(rank - 1) % size: expected} if expected else {}
        rows = rows_of(messages, self._previous)
        self._launched = collectives.send_receive_start(self._comm, rows, send, recv, label=LABEL)

    def wait(self, step: int) -> None:
        assert self._launched is not None
        self._previous = self._launched.wait()
        rows = iter(self._previous.unbind(0))
        up_to, whole = self._expected(step)
        if up_to is not None:
            self._before[up_to] = next(rows)
        if whole is not None:
            self._total[whole] = next(rows)

    def results(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The elements before this rank and those of all, combined."""
        before_BHX = join_pieces(self._monoid, self._before, self._columns)
        return connected(before_BHX, self._previous), join_pieces(self._monoid, self._total, self._columns)

    def _expected(self, step: int) -> tuple[int | None, int | None]:
        """The piece of the elements before this rank and the piece of the total that arrive in a step."""
        rank, size = self._comm.rank, self._comm.size
        up_to = _index(step - (rank - 1), self._own) if rank else None
        whole = _index(step - (size - 1) - rank, self._own) if rank < size - 1 else None
        return up_to, whole


def _index(number: int, pieces: tuple[torch.Tensor, ...]) -> int | None:
    return number if 0 <= number < len(pieces) else None
