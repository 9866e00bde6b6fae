"""The part of the MPI library in use: to start and to end, to carry messages and scans, and to wait without its waits.

MPI_Init waits for the other ranks, spins meanwhile and, called through mpi4py, holds the interpreter's lock: neither
a signal nor another thread would run. So it is called in a thread that holds no lock and is waited for. MPI is brought
up once and with a deadline, and taken down at exit only if all ranks left in order.

The scan is MPI's own exclusive scan with an operator of ours: started and then asked for, as a message is. A rank that
waits does not take the core from the ranks that are waited for.
"""

import atexit
import ctypes
import os
import sys
import threading
import time
from types import ModuleType
from typing import TYPE_CHECKING, cast, final

import torch
from torch import Tensor

from dist_attn.comm.call import Combine, first_line
from dist_attn.errors import CommError, ConfigError, MismatchError, MissingExtraError, extra_hint
from dist_attn.launchers import is_first_rank, read_launch

if TYPE_CHECKING:
    from mpi4py import MPI
    from mpi4py.typing import Buffer

LINGER_S = 0.5

_abandoned: list[object] = []


def start_mpi(timeout_s: float) -> ModuleType:
    """Return the module `mpi4py.MPI` with MPI initialised, here or before.

    Raises: MissingExtraError without mpi4py or an MPI library; ConfigError where MPI was initialised for calls of one
    thread; CommError if it was finalised before, or the ranks do not come together in time.
    """
    try:
        import mpi4py

        if "mpi4py.MPI" not in sys.modules:
            mpi4py.rc(initialize=False, finalize=False)
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        # mpi4py without a library to load is a RuntimeError.
        raise MissingExtraError(
            f"back end mpi needs mpi4py and an MPI library ({first_line(error)}): {extra_hint('mpi')}"
        ) from error
    if MPI.Is_finalized():
        raise CommError("MPI has been finalised in this process and cannot be started again")
    if not MPI.Is_initialized():
        _initialise(MPI, timeout_s)
        atexit.register(_finish, MPI)
    if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
        raise ConfigError("back end mpi calls MPI from one thread at a time, but not always the same; initialise MPI "
                          "with MPI_THREAD_SERIALIZED or leave it to dist-attn")  # fmt: skip
    return MPI


def leave_running(*memory: object) -> None:
    """Never finalise, as the group did not end in order; keep memory to which messages under way may still write."""
    _abandoned.append(memory)


def _initialise(MPI: ModuleType, timeout_s: float) -> None:
    library = ctypes.CDLL(MPI.__file__)  # finds the symbols of the MPI library that mpi4py is linked to
    provided = ctypes.c_int()
    code: list[int] = []

    def work() -> None:
        code.append(library.MPI_Init_thread(None, None, ctypes.c_int(MPI.THREAD_MULTIPLE), ctypes.byref(provided)))

    thread = threading.Thread(target=work, name="mpi-init", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if code == [0]:
        return
    launch = read_launch(os.environ)
    who = f"rank {launch.rank} of {launch.size}" if launch is not None else "this process"
    what = f"error {code[0]}" if code else f"no answer within {timeout_s:g} s"
    raise CommError(f"{who} could not join the mpi group, MPI_Init: {what}; are all ranks started, and still there?")


def _finish(MPI: ModuleType) -> None:
    """Finalise MPI at the exit of the process. It waits for every rank, so only groups that ended in order do it."""
    if not _abandoned:
        MPI.Finalize()
    elif not is_first_rank(os.environ):
        # The launcher kills all ranks when one fails: rank 0, which speaks for all, must have said what it has to.
        time.sleep(LINGER_S)


# ---- messages ------------------------------------------------------------------------------------

PIECE_BYTES = 1 << 30  # of one message; older MPI libraries count in 32 bits

GIVE_WAY_S = 0.0003  # how long a wait only gives way, before it sleeps
LONGEST_SLEEP_S = 0.005


@final
class MpiMessage:
    """One piece on its way to `partner` or, of `expected` bytes, from it."""

    def __init__(self, mpi: ModuleType, request: "MPI.Request", partner: int, expected: int | None = None) -> None:
        self._mpi = mpi
        self._request = request
        self._status = mpi.Status()
        self._expected = expected
        self._done = False
        self.partner = partner

    def done(self) -> bool:
        """Return whether the message has been sent or has arrived.

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
    """Cut a part into what goes into one message each; an empty part is one empty message."""
    return part.split(PIECE_BYTES) if part.numel() else (part,)


def rest(waited_s: float) -> None:
    """Let others run: at first without losing time, then asleep for an eighth of the wait so far."""
    if waited_s > GIVE_WAY_S:
        time.sleep(min(waited_s / 8, LONGEST_SLEEP_S))
    elif hasattr(os, "sched_yield"):
        os.sched_yield()
    else:
        time.sleep(0)


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
        roll_call: list[MpiMessage],
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
        """Return whether the result is there.

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
        """Combine both into `later`; an exception here would end the process, and is kept for `done`."""
        try:
            into = torch.frombuffer(later, dtype=torch.uint8)
            into.copy_(self._combine(torch.frombuffer(earlier, dtype=torch.uint8), into))
        except Exception as error:
            self._error = error


def reversed_ranks(comm: "MPI.Intracomm") -> "MPI.Intracomm":
    """Make a communicator of the same ranks, counted from the last. Blocks: for a thread waited for with a deadline."""
    return cast("MPI.Intracomm", comm.Split(0, comm.Get_size() - comm.Get_rank()))
