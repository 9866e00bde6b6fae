"""Messages and scans of MPI on their way, and how to wait without taking the core from the ranks that are waited for.

The scan is MPI's own exclusive scan with an operator of ours: started and then asked for, as a message is.
"""

import os
import time
from types import ModuleType
from typing import TYPE_CHECKING, cast, final

import torch
from torch import Tensor

from dist_attn.comm.call import Combine
from dist_attn.errors import MismatchError

if TYPE_CHECKING:
    from mpi4py import MPI
    from mpi4py.typing import Buffer


PIECE_BYTES = 1 << 30  # of one message; older MPI libraries count in 32 bits

GIVE_WAY_S = 0.0003  # how long a wait only gives way, before it sleeps
LONGEST_SLEEP_S = 0.005


@final
class Message:
    """One piece on its way to `partner` or, of `expected` bytes, from it."""

    def __init__(self, mpi: ModuleType, request: "MPI.Request", partner: int, expected: int | None = None) -> None:
        self._mpi = mpi
        self._request = request
        self._status = mpi.Status()
        self._expected = expected
        self._done = False
        self.partner = partner

    def done(self) -> bool:
        """Whether it has been sent or has arrived.

        Raises: MismatchError if it is not of the expected size.
        """
        if self._done:
            return True
        try:
            self._done = self._request.Test(self._status)
        except self._mpi.Exception as error:
            if error.Get_error_class() == self._mpi.ERR_TRUNCATE:
                raise self._wrong_size("more") from error
            raise
        if self._done and self._expected is not None:
            count = self._status.Get_count(self._mpi.BYTE)
            if count != self._expected:
                raise self._wrong_size(str(count))
        return self._done

    def _wrong_size(self, count: str) -> MismatchError:
        return MismatchError(
            f"rank {self.partner} sent {count} bytes where {self._expected} were expected; the send counts of one must "
            "be the receive counts of the other"
        )


def pieces(part: Tensor) -> tuple[Tensor, ...]:
    """What goes into one message each; an empty part is one empty message."""
    return part.split(PIECE_BYTES) if part.numel() else (part,)


def rest(waited_s: float) -> None:
    """Let others run: at first without losing time, then asleep for an eighth of the wait so far."""
    if waited_s > GIVE_WAY_S:
        time.sleep(min(waited_s / 8, LONGEST_SLEEP_S))
    elif hasattr(os, "sched_yield"):
        os.sched_yield()
    else:
        time.sleep(0)


def first_line(error: BaseException) -> str:
    """What an error says first."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


@final
class Scan:
    """One `MPI_Iexscan` on its way; it has no partner, since MPI does not say who is late.

    The whole of a rank's bytes is one element of a derived datatype, so that MPI cuts it nowhere, and the operator does
    not commute. `roll_call` are messages that say that the other ranks make the same call.
    """

    partner = -1

    def __init__(
        self,
        mpi: ModuleType,
        comm: "MPI.Intracomm",
        own: Tensor,
        before: Tensor,
        combine: Combine,
        roll_call: list[Message],
    ) -> None:
        self._mpi = mpi
        self._roll_call = roll_call
        self._combine = combine
        self._error: BaseException | None = None
        self._done = False
        # Tensors and operator live as long as this does: MPI writes to the one and calls the other meanwhile.
        self._memory = own, before
        self._operator = mpi.Op.Create(self._operate, commute=False)
        self._type = mpi.BYTE.Create_contiguous(own.numel()).Commit()
        self._request = comm.Iexscan([own.numpy(), 1, self._type], [before.numpy(), 1, self._type], self._operator)

    def done(self) -> bool:
        """Whether the result is there.

        Ranks that call different things may fail inside MPI, which cannot say whose fault it is; the roll call can, so
        that an error counts from when all have answered it.
        """
        if self._done:
            return True
        if self._error is None:
            try:
                self._done = self._request.Test()
            except self._mpi.Exception as error:
                self._error = error
        if self._error is not None and all(message.done() for message in self._roll_call):
            raise self._error
        if self._done and self._error is None:
            self._operator.Free()
            self._type.Free()
            return True
        return False

    def _operate(self, earlier: "Buffer", later: "Buffer", _: "MPI.Datatype") -> None:
        """`later` becomes both; an exception here would end the process, and is kept for `done`."""
        try:
            into = torch.frombuffer(later, dtype=torch.uint8)
            into.copy_(self._combine(torch.frombuffer(earlier, dtype=torch.uint8), into))
        except Exception as error:
            self._error = error


def reversed_ranks(comm: "MPI.Intracomm") -> "MPI.Intracomm":
    """The same ranks, counted from the last. Blocks: for a thread that is waited for with a deadline."""
    return cast("MPI.Intracomm", comm.Split(0, comm.Get_size() - comm.Get_rank()))
