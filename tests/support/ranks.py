"""Run a function on every rank of a group: threads of this process, or real processes joined by gloo or MPI."""

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import cache
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Literal, TypeVar, cast

import torch

from dist_attn.comm import Communicator, run_simulated
from dist_attn.comm.local import LocalCommunicator
from dist_attn.comm.torch_dist import TorchDistCommunicator
from dist_attn.errors import CommError
from tests.support.mpi import run_mpi

Kind = Literal["local", "simulated", "gloo", "mpi"]
Result = TypeVar("Result")

PROCESS_DEADLINE_S = 90.0


def run_ranks(kind: Kind, fn: Callable[[Communicator], Result], size: int, *, timeout_s: float = 60.0) -> list[Result]:
    """What `fn(comm)` returned on each rank, in order of rank.

    For gloo and mpi, `fn` must be a function that can be imported by name (or a `functools.partial` of one), and its
    results must pickle. Raises what a rank raised by itself, before what others raised because they lost it.
    """
    if kind == "local":
        assert size == 1
        return [fn(LocalCommunicator())]
    if kind == "simulated":
        return run_simulated(fn, size, timeout_s=timeout_s)
    run = run_mpi if kind == "mpi" else run_processes
    outcomes = run(fn, size, timeout_s=timeout_s)
    failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    if failures:
        raise next((failure for failure in failures if not isinstance(failure, CommError)), failures[0])
    return cast(list[Result], outcomes)


def run_processes(
    fn: Callable[[Communicator], Result], size: int, *, timeout_s: float = 60.0
) -> list[Result | BaseException]:
    """What each gloo rank returned or raised; a process that died without a word gives an EOFError."""
    with tempfile.TemporaryDirectory() as folder:
        pipes = [forkserver().Pipe(duplex=False) for _ in range(size)]
        processes = []
        for rank, (_, writer) in enumerate(pipes):
            arguments = (fn, rank, size, Path(folder) / "store", timeout_s, writer)
            process = forkserver().Process(target=_rank_main, args=arguments, daemon=True)
            process.start()
            writer.close()
            processes.append(process)
        deadline = time.monotonic() + PROCESS_DEADLINE_S
        try:
            return [_outcome(reader, deadline) for reader, _ in pipes]
        finally:
            for process in processes:
                process.join(max(0.0, deadline - time.monotonic()))
                if process.is_alive():
                    process.kill()
                    process.join(5.0)


@cache
def forkserver() -> ForkServerContext:
    """Processes forked from a server that has imported what ranks need once: a rank starts in milliseconds."""
    context = multiprocessing.get_context("forkserver")
    # Seconds of a core for each rank: what the first step of an optimiser would import, and what the functions' own
    # files do. Of these a package may be missing.
    modules = ["torch", "torch.distributed", "torch._dynamo", "dist_attn.comm", "dist_attn.training"]
    modules += ["pytest", "psutil", "tests.adapters.test_context_parallel", "tests.support.downloaded"]
    context.set_forkserver_preload(modules)
    return context


def _rank_main(
    fn: Callable[[Communicator], Result], rank: int, size: int, store: Path, timeout_s: float, writer: Connection
) -> None:
    """The life of one rank process."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    try:
        comm = TorchDistCommunicator.connect(
            "gloo",
            timeout_s=timeout_s,
            device=torch.device("cpu"),
            meeting=store.as_uri(),
            rank=rank,
            size=size,
            poison=True,
        )
        with comm:
            outcome: Result | BaseException = fn(comm)
        data = pickle.dumps(outcome)
    except BaseException as error:
        error.add_note(f"raised on gloo rank {rank} of {size}\n{traceback.format_exc()}")
        data = _pickled(error)
    writer.send_bytes(data)
    writer.close()


def _pickled(error: BaseException) -> bytes:
    try:
        return pickle.dumps(error)
    except Exception:
        return pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))


def _outcome(reader: Connection, deadline: float) -> object:
    """The unpickled outcome of one rank; tests trust their own processes."""
    try:
        if not reader.poll(max(0.0, deadline - time.monotonic())):
            return TimeoutError(f"a rank process did not finish within {PROCESS_DEADLINE_S:g} s")
        return pickle.loads(reader.recv_bytes())
    except EOFError as error:
        return error
    finally:
        reader.close()
