"""Ranks of this machine that run for a moment, so that a command can measure or try something with real processes."""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from dist_attn.control.processes import end_process
from dist_attn.control.ranks import child_environment
from dist_attn.errors import EngineError
from dist_attn.launchers import find_mpiexec
from dist_attn.rank_link.tether import die_with_parent
from dist_attn.shipped.folder_files import put_in_place

if TYPE_CHECKING:
    import torch

    from dist_attn.comm import Communicator
    from dist_attn.devices import Compute

END_S = 10.0
MATMUL_SIZE, COPY_BYTES, SPEED_S = 768, 32 << 20, 0.3
MATMUL_SIZE_OF_GPU, COPY_BYTES_OF_GPU, AT_ONCE = 4096, 1 << 30, 10  # no copy stays in a cache
POLL_S = 0.05


class TrialSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of one of the processes; under mpiexec, which tells the rank itself, all get the same.

    `folder` is private to the trial: the ranks meet there, and rank 0 writes there what was found. `timeout_s` bounds
    every exchange.
    """

    rank: int = 0
    ranks: int
    folder: str = ""
    backend: str = "gloo"
    timeout_s: float

    @property
    def result(self) -> Path:
        """The file that rank 0 writes when it is done."""
        return Path(self.folder) / "result"

    def write_result(self, value: object) -> None:
        """Leave the result to the command, whole or not at all."""
        put_in_place(self.result, msgspec.json.encode(value))


S = TypeVar("S", bound=TrialSettings)


def run_trial(
    module: str, settings: TrialSettings, *, doing: str, deadline_s: float, environment: dict[str, str]
) -> bytes:
    """Run `python -m MODULE SETTINGS` once for each rank until the first has a result; returns the result as JSON.

    Raises: EngineError when the processes cannot be started, fail or are late; `doing` says what they do.
    """
    with tempfile.TemporaryDirectory(prefix="dist-attn-trial-") as private:
        settings, words = msgspec.structs.replace(settings, folder=private), Path(private) / "stderr"
        with started(_commands(module, settings), words, environment) as processes:
            until, codes = time.monotonic() + deadline_s, [process.poll() for process in processes]
            while codes[0] is None and not any(codes):
                if time.monotonic() > until:
                    raise EngineError(f"{settings.ranks} ranks did not finish {doing} within {deadline_s:g} s")
                time.sleep(POLL_S)
                codes = [process.poll() for process in processes]
        if any(codes) or not settings.result.exists():
            said = last_line(words) or f"exit codes {codes}"
            raise EngineError(f"{doing} with {settings.ranks} rank(s) failed: {said}")
        return settings.result.read_bytes()


@contextlib.contextmanager
def started(
    commands: Sequence[Sequence[str]], words: Path, environment: dict[str, str] | None = None
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Run processes that end with the block; their output on stderr goes into a file."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        with words.open("wb") as stderr:
            for command in commands:
                own, silent = child_environment() | (environment or {}), subprocess.DEVNULL
                processes.append(subprocess.Popen(command, stdin=silent, stdout=silent, stderr=stderr, env=own))
        yield processes
    finally:
        # By SIGTERM first: mpiexec ends its ranks when it is asked to, and cannot when it is killed.
        for process in processes:
            process.terminate()
        deadline = time.monotonic() + END_S
        for process in processes:
            end_process(process, max(0.0, deadline - time.monotonic()))


def last_line(words: Path) -> str:
    """The last line that processes wrote, "" where they wrote nothing."""
    return "".join(words.read_text(errors="replace").strip().splitlines()[-1:])


def gather_times(comm: "Communicator", size: int, *, rounds: int, warm_up: int) -> list[float]:
    """Time each of `rounds` all-gathers of `size` bytes, in seconds, after some to warm up; all ranks call this."""
    import torch

    message, seconds = torch.zeros(size, dtype=torch.uint8), []
    for _ in range(warm_up + rounds):
        began = time.perf_counter()
        comm.all_gather(message)
        seconds.append(time.perf_counter() - began)
    return seconds[warm_up:]


def machine_speeds(together: Callable[[], object] = lambda: None, compute: "Compute | None" = None) -> list[float]:
    """Measure operations per second in a product of matrices, and bytes read and written per second in a copy.

    Ranks that meet in `together` are timed at once. Without `compute` it is float32 on the CPU.
    """
    import torch

    from dist_attn.devices import ON_CPU

    compute = compute or ON_CPU
    on_gpu = compute.device.type == "cuda"
    size, copied = (MATMUL_SIZE_OF_GPU, COPY_BYTES_OF_GPU) if on_gpu else (MATMUL_SIZE, COPY_BYTES)
    a, b = torch.randn(2, size, size, device=compute.device, dtype=compute.dtype)
    source = torch.zeros(copied, dtype=torch.uint8, device=compute.device)
    target = torch.empty_like(source)

    def wait() -> None:
        if on_gpu:
            torch.cuda.synchronize(compute.device)

    def per_second(work: Callable[[], object]) -> float:
        work()
        wait()
        together()
        began, times = time.perf_counter(), 0
        while time.perf_counter() - began < SPEED_S:
            work()
            times += 1
            if times % AT_ONCE == 0:
                wait()
        wait()
        return times / (time.perf_counter() - began)

    return [2 * size**3 * per_second(lambda: a @ b), 2 * copied * per_second(lambda: target.copy_(source))]


def _commands(module: str, settings: TrialSettings) -> list[list[str]]:
    """The commands that start the ranks: a process each, or one mpiexec for all."""
    if settings.backend == "mpi":
        return [[find_mpiexec() or "mpiexec", "-n", str(settings.ranks), *trial_command(module, settings)]]
    each = [msgspec.structs.replace(settings, rank=rank) for rank in range(settings.ranks)]
    return [trial_command(module, one) for one in each]


def trial_command(module: str, settings: TrialSettings) -> list[str]:
    """The command of one process, which calls `read_own` with its arguments."""
    return [sys.executable, "-m", module, msgspec.json.encode(settings).decode()]


def read_own(arguments: list[str], kind: type[S]) -> S:
    """Read the settings of this trial process, and tie it to the command that started it."""
    die_with_parent()
    (text,) = arguments
    return msgspec.json.decode(text, type=kind)


def join_trial(settings: TrialSettings, device: "torch.device | None" = None) -> "Communicator":
    """Join the other processes of the trial, which compute on the same kind of device; without one on CPUs."""
    from dist_attn.comm import Rendezvous, open_communicator

    if settings.ranks == 1:
        return open_communicator("local")
    if settings.backend == "mpi":
        return open_communicator("mpi", timeout_s=settings.timeout_s)
    os.environ |= {"RANK": str(settings.rank), "WORLD_SIZE": str(settings.ranks)}
    meeting = Rendezvous((Path(settings.folder) / "store").as_uri(), settings.timeout_s)
    backend = settings.backend if device is None or device.type == "cpu" else None
    return open_communicator(backend, settings.timeout_s, device, meeting)
