"""MPI in this process: brought up once and with a deadline, taken down at exit and only if all ranks left in order.

MPI_Init waits for the other ranks, spins meanwhile and, called through mpi4py, holds the interpreter's lock: neither
a signal nor another thread would run. So it is called in a thread that holds no lock and is waited for.
"""

import atexit
import ctypes
import os
import sys
import threading
import time
from types import ModuleType

from dist_attn.comm.mpi_messages import first_line
from dist_attn.errors import CommError, ConfigError, MissingExtraError, extra_hint
from dist_attn.launchers import is_first_rank, read_launch

__all__ = ["leave_running", "start_mpi"]

LINGER_S = 0.5

_abandoned: list[object] = []


def start_mpi(timeout_s: float) -> ModuleType:
    """The module `mpi4py.MPI` with MPI initialised, by whomever.

    Raises: MissingExtraError without mpi4py or an MPI library; CommError if the ranks do not come together in time.
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
    """The group did not end in order: keep what messages under way may still write to, and never finalise."""
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
    """At the exit of the process: MPI_Finalize waits for every rank, so it is for groups that ended in order."""
    if not _abandoned:
        MPI.Finalize()
    elif not is_first_rank(os.environ):
        # The launcher kills all ranks when one fails: rank 0, which speaks for all, must have said what it has to.
        time.sleep(LINGER_S)
