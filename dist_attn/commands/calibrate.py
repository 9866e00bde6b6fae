"""`python -m dist_attn.commands.calibrate`: ranks that time every exchange of carries, for `doctor --calibrate`."""

import contextlib
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from dist_attn.commands.finding import Finding, missing, ok
from dist_attn.commands.tables import byte_size, duration
from dist_attn.control.ranks import child_environment
from dist_attn.costs import Calibration, ScanTime, calibration_file, read_calibration, timed_exchanges
from dist_attn.errors import EngineError
from dist_attn.launchers import find_mpiexec, lacks_for_mpi
from dist_attn.rank_link.tether import die_with_parent
from dist_attn.wire.choices import CpuBackend

if TYPE_CHECKING:
    from dist_attn.comm import Communicator

__all__ = ["CALIBRATED_RANKS", "calibrate", "measure_exchanges"]

CALIBRATED_RANKS = (2, 4)
FEATURES, VALUES = 128, 64  # of one head of the message that is timed
HEADS = (1, 8, 64)
ROUNDS, WARM_UP_ROUNDS = 15, 3
DEADLINE_S = 60.0
END_S = 5.0


class CalibrateSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What one of the processes is told."""

    rank: int  # of mpi what the launcher says
    ranks: int
    folder: str  # private: where the ranks meet, and where rank 0 writes what was measured
    backend: CpuBackend = "gloo"
    heads: tuple[int, ...] = HEADS
    rounds: int = ROUNDS


def calibrate(ranks: Sequence[int] = CALIBRATED_RANKS) -> list[Finding]:
    """Measure with so many ranks, keep the times in the user's cache, and say which exchange was fastest.

    Over gloo, and over MPI where it is installed. Two levels are not timed: one machine is one host.
    """
    file = calibration_file(os.environ)
    known = read_calibration(file)
    findings = []
    backends: list[CpuBackend] = ["gloo"] if lacks_for_mpi() else ["gloo", "mpi"]
    for backend, count in itertools.product(backends, ranks):
        name = f"exchange {count}" if backend == "gloo" else f"exchange {count} mpi"
        try:
            times = measure_exchanges(count, backend)
            known = known.with_times(times)
            known.write(file)
        except (EngineError, OSError) as error:
            findings.append(missing(name, f"not measured: {error}", "the rule of thumb is used"))
            continue
        findings.append(ok(name, _in_words(known, times, count, backend), ranks=count))
    return findings


def measure_exchanges(
    ranks: int, backend: CpuBackend = "gloo", *, heads: tuple[int, ...] = HEADS, rounds: int = ROUNDS
) -> tuple[ScanTime, ...]:
    """Seconds of each exchange between so many processes of this machine, for a few sizes of state.

    Raises: EngineError when the processes cannot be started, fail or are late.
    """
    environment = child_environment() | {"OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="dist-attn-calibrate-") as private, contextlib.ExitStack() as stack:
        words = Path(private) / "stderr"
        stderr = stack.enter_context(words.open("wb"))
        processes = []
        for rank in range(ranks if backend == "gloo" else 1):
            settings = CalibrateSettings(
                rank=rank, ranks=ranks, folder=private, backend=backend, heads=heads, rounds=rounds
            )
            command = [sys.executable, "-m", "dist_attn.commands.calibrate", msgspec.json.encode(settings).decode()]
            if backend == "mpi":
                command = [find_mpiexec() or "mpiexec", "-n", str(ranks), *command]
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr, env=environment
            )
            stack.callback(process.wait, END_S)
            # mpiexec ends its ranks when it is asked to, and cannot when it is killed.
            stack.callback(process.terminate if backend == "mpi" else process.kill)
            processes.append(process)
        try:
            code = processes[0].wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise EngineError(f"{ranks} ranks did not finish timing exchanges within {DEADLINE_S:g} s") from None
        result = Path(private) / "times"
        if code or not result.exists():
            said = words.read_text(errors="replace").strip().splitlines() or [f"exit code {code}"]
            raise EngineError(f"timing exchanges with {ranks} ranks failed: {said[-1]}")
        return msgspec.json.decode(result.read_bytes(), type=tuple[ScanTime, ...])


def _in_words(known: Calibration, times: Sequence[ScanTime], ranks: int, backend: CpuBackend) -> str:
    sizes = sorted({t.message_bytes for t in times})
    parts = []
    for size in sizes:
        best = known.choose(backend, ranks, size)
        seconds = next(t.seconds for t in times if t.message_bytes == size and t.algorithm == best)
        parts.append(f"{best} for {byte_size(size)} ({duration(seconds)})")
    return f"fastest between {ranks} ranks: {', '.join(parts)}"


def _run(settings: CalibrateSettings) -> None:
    """This rank's part; rank 0 writes the result."""
    import torch

    from dist_attn.ops import LinearState
    from dist_attn.sharded import Exchange, exclusive_scan

    algorithms = timed_exchanges(settings.ranks, settings.backend)
    found = []
    with torch.inference_mode(), _join(settings) as comm:
        for heads in settings.heads:
            state = LinearState.identity(1, heads, FEATURES, VALUES)
            seconds: dict[str, list[float]] = {name: [] for name in algorithms}
            for _ in range(WARM_UP_ROUNDS + settings.rounds):
                for name in algorithms:  # in turns, so that a change of the machine's speed meets all of them
                    comm.barrier()
                    began = time.perf_counter()
                    exclusive_scan(comm, state, None, Exchange(name))
                    seconds[name].append(time.perf_counter() - began)
            medians = torch.tensor([statistics.median(seconds[name][WARM_UP_ROUNDS:]) for name in algorithms])
            # The exchange is over when it is over everywhere.
            slowest = comm.all_gather(medians.double()).amax(dim=0).tolist()
            size = 4 * heads * (FEATURES * (VALUES + 1) + 2)
            times = zip(algorithms, slowest, strict=True)
            found += [ScanTime(settings.backend, settings.ranks, name, size, s) for name, s in times]
        first = comm.rank == 0
    if first:
        result = Path(settings.folder) / "times"
        beside = result.with_suffix(".writing")
        beside.write_bytes(msgspec.json.encode(found))
        beside.rename(result)


def _join(settings: CalibrateSettings) -> "Communicator":
    import torch

    from dist_attn.comm.mpi import MpiCommunicator
    from dist_attn.comm.torch_dist import TorchDistCommunicator

    if settings.backend == "mpi":
        return MpiCommunicator.connect(timeout_s=DEADLINE_S / 2)
    return TorchDistCommunicator.connect(
        "gloo",
        timeout_s=DEADLINE_S / 2,
        device=torch.device("cpu"),
        init_method=(Path(settings.folder) / "store").as_uri(),
        rank=settings.rank,
        size=settings.ranks,
    )


def main(arguments: list[str]) -> None:
    """Run the part that the one argument, `CalibrateSettings` as JSON, describes."""
    die_with_parent()
    (text,) = arguments
    _run(msgspec.json.decode(text, type=CalibrateSettings))


if __name__ == "__main__":
    main(sys.argv[1:])
