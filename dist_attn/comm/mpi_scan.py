"""MPI's own exclusive scan with an operator of ours: started and then asked for, as a message is."""

from types import ModuleType
from typing import TYPE_CHECKING, cast, final

import torch
from torch import Tensor

from dist_attn.comm.mpi_messages import Message
from dist_attn.comm.pass_along import Combine

if TYPE_CHECKING:
    from mpi4py import MPI
    from mpi4py.typing import Buffer

__all__ = ["Scan", "reversed_ranks"]


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
