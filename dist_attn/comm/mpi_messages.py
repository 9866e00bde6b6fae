"""One message of MPI on its way, and how to wait for it without taking the core from the ranks that are waited for."""

import os
import time
from types import ModuleType
from typing import TYPE_CHECKING, final

from torch import Tensor

from dist_attn.errors import MismatchError

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Message", "first_line", "pieces", "rest"]

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
