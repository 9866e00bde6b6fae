"""`python -m dist_attn.engine.calibrate`: ranks that time every exchange of carries, for `doctor --calibrate`."""

import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from dist_attn.control.ranks import child_environment
from dist_attn.control.tether import die_with_parent
from dist_attn.costs import Calibration, ScanTime, calibration_file, read_calibration
from dist_attn.engine.finding import Finding, missing, ok
from dist_attn.engine.tables import byte_size, duration
from dist_attn.errors import EngineError

__all__ = ["CALIBRATED_RANKS", "calibrate", "measure_exchanges"]

CALIBRATED_RANKS = (2, 4)
FEATURES, VALUES = 128, 64  # of one head of the message that is timed
HEADS = (1, 8, 64)
ROUNDS, WARM_UP_ROUNDS = 15, 3
DEADLINE_S = 60.0
END_S = 5.0


class CalibrateSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What one of the processes is told."""

    rank: int
    ranks: int
    folder: str  # private: where the ranks meet, and where rank 0 writes what was measured
    heads: tuple[int, ...] = HEADS
    rounds: int = ROUNDS


def calibrate(ranks: Sequence[int] = CALIBRATED_RANKS) -> list[Finding]:
    """Measure with so many ranks, keep the times in the user's cache, and say which exchange was fastest."""
    file = calibration_file(os.environ)
    known = read_calibration(file)
    findings = []
    for count in ranks:
        try:
            times = measure_exchanges(count)
            known = known.with_times(times)
            known.write(file)
        except (EngineError, OSError) as error:
            findings.append(missing(f"exchange {count}", f"not measured: {error}", "the rule of thumb is used"))
            continue
        findings.append(ok(f"exchange {count}", _in_words(known, times, count), ranks=count))
    return findings


def measure_exchanges(ranks: int, *, heads: tuple[int, ...] = HEADS, rounds: int = ROUNDS) -> tuple[ScanTime, ...]:
    """Seconds of each exchange between so many gloo processes of this machine, for a few sizes of state.

    Raises: EngineError when the processes cannot be started, fail or are late.
    """
    environment = child_environment() | {"OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="dist-attn-calibrate-") as private, contextlib.ExitStack() as stack:
        words = Path(private) / "stderr"
        stderr = stack.enter_context(words.open("wb"))
        processes = []
        for rank in range(ranks):
            settings = CalibrateSettings(rank=rank, ranks=ranks, folder=private, heads=heads, rounds=rounds)
            command = [sys.executable, "-m", "dist_attn.engine.calibrate", msgspec.json.encode(settings).decode()]
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr, env=environment
            )
            stack.callback(process.wait, END_S)
            stack.callback(process.kill)
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


def _in_words(known: Calibration, times: Sequence[ScanTime], ranks: int) -> str:
    sizes = sorted({t.message_bytes for t in times})
    parts = []
    for size in sizes:
        best = known.choose("gloo", ranks, size)
        seconds = next(t.seconds for t in times if t.message_bytes == size and t.algorithm == best)
        parts.append(f"{best} for {byte_size(size)} ({duration(seconds)})")
    return f"fastest between {ranks} ranks: {', '.join(parts)}"


def _run(settings: CalibrateSettings) -> None:
    """This rank's part; rank 0 writes the result."""
    import torch

    from dist_attn.comm.torch_dist import TorchDistCommunicator
    from dist_attn.ops import LinearState
    from dist_attn.sharded import Exchange, exclusive_scan

    algorithms = ["gather", "log_step", "pipelined_ring", *(["pair"] if settings.ranks == 2 else [])]
    found = []
    with (
        torch.inference_mode(),
        TorchDistCommunicator.connect(
            "gloo",
            timeout_s=DEADLINE_S / 2,
            device=torch.device("cpu"),
            init_method=(Path(settings.folder) / "store").as_uri(),
            rank=settings.rank,
            size=settings.ranks,
        ) as comm,
    ):
        for heads in settings.heads:
            state = LinearState.identity(1, heads, FEATURES, VALUES)
            seconds: dict[str, list[float]] = {name: [] for name in algorithms}
            for _ in range(WARM_UP_ROUNDS + settings.rounds):
                for name in algorithms:  # in turns, so that a change of the machine's speed meets all of them
                    comm.barrier()
                    began = time.perf_counter()
                    exclusive_scan(comm, state, None, Exchange(name))  # type: ignore[arg-type]
                    seconds[name].append(time.perf_counter() - began)
            medians = torch.tensor([statistics.median(seconds[name][WARM_UP_ROUNDS:]) for name in algorithms])
            # The exchange is over when it is over everywhere.
            slowest = comm.all_gather(medians.double()).amax(dim=0).tolist()
            size = 4 * heads * (FEATURES * (VALUES + 1) + 2)
            found += [ScanTime("gloo", settings.ranks, n, size, s) for n, s in zip(algorithms, slowest, strict=True)]
    if settings.rank == 0:
        result = Path(settings.folder) / "times"
        beside = result.with_suffix(".writing")
        beside.write_bytes(msgspec.json.encode(found))
        beside.rename(result)


def main(arguments: list[str]) -> None:
    """Run the part that the one argument, `CalibrateSettings` as JSON, describes."""
    die_with_parent()
    (text,) = arguments
    _run(msgspec.json.decode(text, type=CalibrateSettings))


if __name__ == "__main__":
    main(sys.argv[1:])
