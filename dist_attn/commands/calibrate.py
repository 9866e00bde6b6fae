"""`python -m dist_attn.commands.calibrate`: ranks that time every exchange of carries, for `doctor --measure`."""

import itertools
import os
import statistics
import sys
import time
from collections.abc import Sequence

import msgspec

from dist_attn.commands.machine import MachineFinding, missing, ok
from dist_attn.commands.tables import byte_size, duration
from dist_attn.commands.trial_ranks import TrialSettings, join_trial, read_own, run_trial
from dist_attn.costs import Calibration, ScanTime, calibration_file, read_calibration, timed_exchanges
from dist_attn.errors import EngineError
from dist_attn.launchers import lacks_for_mpi
from dist_attn.wire.choices import CpuBackend

__all__ = ["CALIBRATED_RANKS", "calibrate", "measure_exchanges"]

CALIBRATED_RANKS = (2, 4)
FEATURES, VALUES = 128, 64  # of one head of the message that is timed
HEADS = (1, 8, 64)
ROUNDS, WARM_UP_ROUNDS = 15, 3
DEADLINE_S = 60.0


class CalibrateSettings(TrialSettings, frozen=True, kw_only=True):
    """Arguments of one of the processes that time exchanges."""

    heads: tuple[int, ...] = HEADS
    rounds: int = ROUNDS


def calibrate(ranks: Sequence[int] = CALIBRATED_RANKS) -> list[MachineFinding]:
    """Time the exchanges over each number of ranks, keep the times in the user's cache, and say which were fastest.

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
    settings = CalibrateSettings(ranks=ranks, backend=backend, heads=heads, rounds=rounds, timeout_s=DEADLINE_S / 2)
    result = run_trial(
        "dist_attn.commands.calibrate",
        settings,
        doing="timing exchanges",
        deadline_s=DEADLINE_S,
        environment={"OMP_NUM_THREADS": "1"},
    )
    return msgspec.json.decode(result, type=tuple[ScanTime, ...])


def _in_words(known: Calibration, times: Sequence[ScanTime], ranks: int, backend: CpuBackend) -> str:
    sizes = sorted({t.message_bytes for t in times})
    parts = []
    for size in sizes:
        best = known.choose(backend, ranks, size)
        seconds = next(t.seconds for t in times if t.message_bytes == size and t.algorithm == best)
        parts.append(f"{best} for {byte_size(size)} ({duration(seconds)})")
    return f"fastest between {ranks} ranks: {', '.join(parts)}"


def _run(settings: CalibrateSettings) -> None:
    """Time the exchanges as this rank; rank 0 writes the result."""
    import torch

    from dist_attn.ops import LinearState
    from dist_attn.sharded import ScanExchange, exclusive_scan

    algorithms = timed_exchanges(settings.ranks, settings.backend)
    times: list[ScanTime] = []
    with torch.inference_mode(), join_trial(settings) as comm:
        for heads in settings.heads:
            state = LinearState.identity(1, heads, FEATURES, VALUES)
            seconds: dict[str, list[float]] = {name: [] for name in algorithms}
            for _ in range(WARM_UP_ROUNDS + settings.rounds):
                for name in algorithms:  # in turns, so that a change of the machine's speed meets all of them
                    comm.barrier()
                    began = time.perf_counter()
                    exclusive_scan(comm, state, None, ScanExchange(name))
                    seconds[name].append(time.perf_counter() - began)
            medians = torch.tensor([statistics.median(seconds[name][WARM_UP_ROUNDS:]) for name in algorithms])
            # The exchange is over when it is over everywhere.
            slowest = comm.all_gather(medians.double()).amax(dim=0).tolist()
            size = 4 * heads * (FEATURES * (VALUES + 1) + 2)
            measured = zip(algorithms, slowest, strict=True)
            times += [ScanTime(settings.backend, settings.ranks, name, size, s) for name, s in measured]
        first = comm.rank == 0
    if first:
        settings.write_result(times)


if __name__ == "__main__":
    _run(read_own(sys.argv[1:], CalibrateSettings))
