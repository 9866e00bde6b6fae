"""Ranks that mpiexec starts: what a function returned or raised on each; none is left behind."""

import os
import pickle
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from dist_attn.launchers import find_mpiexec, lacks_for_mpi
from tests.support.source_path import SOURCE_PATH

if TYPE_CHECKING:
    from dist_attn.comm import Communicator

Result = TypeVar("Result")

ROOT = Path(__file__).resolve().parents[2]
MPI_DEADLINE_S = 90.0


def why_no_mpi() -> str | None:
    """Why tests marked mpi cannot run; None when they can."""
    absent = lacks_for_mpi()
    return f"needs {' and '.join(absent)}: pip install -e '.[mpi]'" if absent else None


def start_under_mpiexec(
    arguments: Sequence[str], size: int, folder: Path, options: Sequence[str] = ()
) -> subprocess.Popen[str]:
    """`mpiexec -n SIZE python ARGUMENTS` in `folder`; whoever starts it calls `kill_family` in the end."""
    mpiexec = find_mpiexec()
    assert mpiexec is not None
    return subprocess.Popen(
        [mpiexec, *options, "-n", str(size), sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": SOURCE_PATH},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """The exit code and what it printed, within the deadline."""
    try:
        out, err = process.communicate(timeout=MPI_DEADLINE_S)
    finally:
        kill_family(process)
    return process.returncode, out, err


def kill_family(process: subprocess.Popen[str]) -> None:
    """Kill it and everything below it."""
    import psutil

    if process.poll() is None:
        own = psutil.Process(process.pid)
        family = [own, *own.children(recursive=True)]
        for member in family:
            member.kill()
        psutil.wait_procs(family, 10.0)
    process.wait(60)


def run_mpi(
    fn: Callable[["Communicator"], Result], size: int, *, timeout_s: float = 60.0, options: Sequence[str] = ()
) -> list[Result | BaseException]:
    """What each rank returned or raised; a rank that ended without a word gives an EOFError.

    `fn` must be a function that can be imported by name, or a `functools.partial` of one; its results must pickle.
    """
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "work").write_bytes(pickle.dumps(fn))
        arguments = ["-m", "tests.support.mpi", folder, str(timeout_s)]
        process = start_under_mpiexec(arguments, size, ROOT, options)
        _, _, said = finish(process)
        return [_outcome(Path(folder) / str(rank), said) for rank in range(size)]


def _outcome(file: Path, said: str) -> object:
    if not file.exists():
        return EOFError(f"rank {file.name} ended without a word; mpiexec said: {said}")
    return pickle.loads(file.read_bytes())  # written by our own process


def _rank_main(folder: str, timeout_s: str) -> None:
    """The life of one rank process."""
    import torch

    from dist_attn.comm.mpi import MpiCommunicator
    from dist_attn.rank_link.tether import die_with_parent

    die_with_parent()
    torch.set_num_threads(1)
    # Joining has time: on a busy machine ranks load torch seconds apart.
    comm = MpiCommunicator.connect(timeout_s=MPI_DEADLINE_S / 2, poison=True)
    comm.timeout_s = float(timeout_s)
    try:
        with comm:
            outcome: object = pickle.loads((Path(folder) / "work").read_bytes())(comm)
    except BaseException as error:
        error.add_note(f"raised on mpi rank {comm.rank} of {comm.size}\n{traceback.format_exc()}")
        outcome = error
    try:
        data = pickle.dumps(outcome)
    except Exception:
        data = pickle.dumps(RuntimeError(f"{type(outcome).__name__}: {outcome}"))
    file = Path(folder) / f"{comm.rank}.part"
    file.write_bytes(data)
    file.rename(file.with_suffix(""))
    # mpiexec kills all ranks when one has failed and ends: the others shall have written what they saw.
    deadline = time.monotonic() + float(timeout_s)
    while time.monotonic() < deadline and not all((Path(folder) / str(rank)).exists() for rank in range(comm.size)):
        time.sleep(0.02)


if __name__ == "__main__":
    _rank_main(*sys.argv[1:])
