"""`make gpu`: everything that is to be known on a machine with a GPU, in pieces that each survive the end of time.

    python -m benchmarks.gpu_check --json F [--seconds 600] [--only PIECE …] [--tune]    on a GPU
    python -m benchmarks.gpu_check --json F --tiny     without one: that all of it runs
    python -m benchmarks.gpu_check --read F            bring into this tree the results of another copy

A piece runs in processes of its own, which end at its deadline, and each case is a line of F as soon as it is done. A
later start with the same F, at the same commit on the same GPU, goes on with what is missing, failed or was wrong.
What is known then goes into the record that `auto` goes by (`dist_attn.ops.gpu_record`), piece by piece, and on an
H200 into the results that the page of measurements is made of.
"""

import argparse
import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import torch

from benchmarks.measured import Measured
from benchmarks.report import file_finding
from benchmarks.setting import Setting, look_around
from dist_attn.ops.gpu_record import GpuRecord, keep_record
from dist_attn.rank_link.tether import die_with_parent

__all__ = ["PIECES", "Results", "main"]

Row = dict[str, Any]
QUESTION = "How fast are the Triton kernels on an H200, against SDPA, flash-linear-attention and a copy?"
END_S = 5.0  # for commands to end what they have started


@dataclass(frozen=True)
class Piece:
    """Cases that `processes` share: a function of a module that makes them, and seconds of ten minutes."""

    module: str
    function: str
    seconds: float
    processes: int = 1


PIECES = {
    # Each case compiles kernels of its own, for which the GPU waits.
    "kernels": Piece("tests.gpu.kernel_cases", "kernel_cases", 130, processes=8),
    "affine": Piece("tests.gpu.affine_cases", "affine_cases", 60, processes=8),
    "ranks": Piece("tests.gpu.rank_cases", "rank_cases", 50),
    "served": Piece("tests.gpu.service_cases", "served_cases", 40),
    "killed": Piece("tests.gpu.service_cases", "killed_cases", 40),
    "captured": Piece("tests.gpu.model_cases", "captured_cases", 40),
    "training": Piece("tests.gpu.model_cases", "training_cases", 70),
    "ratios": Piece("benchmarks.gpu.speed", "ratio_cases", 110),
    "tiles": Piece("benchmarks.gpu.speed", "tile_cases", 60, processes=8),
}


class Results:
    """What a file has of one setting: a line for each start, and after it those of cases and of pieces.

    Of a case the newest line counts; `start` in it is the number of the start that wrote it.
    """

    def __init__(self, file: Path, setting: Mapping[str, Any]) -> None:
        self.file, self.setting = file, dict(setting)

    def read(self) -> tuple[dict[tuple[str, str], Row], int]:
        """The lines of this setting by piece and case, and the number of starts of any."""
        rows: dict[tuple[str, str], Row] = {}
        ours, starts = False, 0
        for line in self.file.read_text().splitlines() if self.file.exists() else ():
            row = json.loads(line)
            if "setting" in row:
                ours, starts = row["setting"] == self.setting, starts + 1
            elif ours:
                rows[row["piece"], row["case"]] = row | {"start": starts}
        return rows, starts

    def of(self, piece: str) -> dict[str, Row]:
        """Its cases."""
        return {case: row for (of, case), row in self.read()[0].items() if of == piece and case}

    def ended(self, piece: str) -> bool:
        """Whether all of its cases were tried."""
        return bool(self.read()[0].get((piece, ""), {}).get("ended"))

    def is_right(self, piece: str) -> bool:
        """Whether nothing of it is left to be done."""
        return self.ended(piece) and all(map(is_right, self.of(piece).values()))

    def write(self, row: Row) -> None:
        """One line, in one go: several processes write."""
        descriptor = os.open(self.file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, json.dumps(row).encode() + b"\n")
        finally:
            os.close(descriptor)


def is_right(row: Row) -> bool:
    """Whether a case ended, and nothing in it was wrong."""
    return "error" not in row and bool(row.get("right", True))


def main(arguments: Sequence[str]) -> int:
    """Exit status 1 where something failed, is wrong or is missing; 2 without a GPU."""
    options = _parser().parse_args(arguments)
    if options.read is not None:
        return _take_over(options.read)
    if not torch.cuda.is_available() and not options.tiny:
        print("gpu_check: there is no GPU here; --tiny shows that all of it runs", file=sys.stderr)
        return 2
    results = Results(options.json, _setting(tiny=options.tiny))
    if options.work:
        return _work(results, options.work, options.number)
    around = asdict(look_around()) | {"machine": results.setting["device"]}
    results.write({"setting": results.setting, "around": around})
    ends = time.monotonic() + options.seconds
    asked = {*(options.only or PIECES.keys() - {"tiles"}), *(["tiles"] if options.tune else ())}
    wanted = [name for name in PIECES if name in asked]
    missing = [name for name in wanted if not results.is_right(name)]
    for number, name in enumerate(missing):
        # What a piece leaves of its time is for those after it.
        left = sum(PIECES[one].seconds for one in missing[number:])
        _run(results, name, (ends - time.monotonic()) * PIECES[name].seconds / left)
        if not options.tiny:
            _keep(results, around)
    return 0 if all(map(results.is_right, wanted)) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check", description="Check and measure a GPU.")
    parser.add_argument("--json", type=Path, metavar="F", default=Path("gpu-check.jsonl"), help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=600.0, help="for all pieces together (default: 600)")
    parser.add_argument("--only", nargs="+", choices=PIECES, help="these pieces")
    parser.add_argument("--tune", action="store_true", help="measure tiles too, last")
    parser.add_argument("--tiny", action="store_true", help="the smallest sizes, also without a GPU")
    parser.add_argument("--read", type=Path, metavar="F", help="bring what a file has into record and results")
    parser.add_argument("--work", choices=PIECES, help=argparse.SUPPRESS)  # this process carries out a piece,
    parser.add_argument("--number", type=int, default=0, help=argparse.SUPPRESS)  # as which of its processes
    return parser


def _setting(*, tiny: bool) -> dict[str, Any]:
    """What results hold for."""
    import triton

    device, driver = "cpu", ""
    if torch.cuda.is_available():
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.split("\n")[0]
        device = torch.cuda.get_device_name()
    versions = {"torch": torch.__version__, "triton": triton.__version__, "commit": look_around().commit}
    return {"device": device, "driver": driver, **versions, "tiny": tiny}


def _run(results: Results, name: str, seconds: float) -> None:
    """Let processes carry a piece out until it is done or its time is over."""
    began = time.monotonic()
    print(f"{name}: at most {seconds:.0f} s", flush=True)
    row: Row = {"piece": name, "case": ""}
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        tried = -1
        while not row.get("ended") and len(results.of(name)) > tried and time.monotonic() < began + seconds:
            # A fault in a kernel takes its process along: another one goes on behind the case that did it.
            tried = len(results.of(name))
            row["ended"] = _one_round(results, name, began + seconds, said)
        if not row["ended"]:
            said.seek(0)
            row["error"] = said.read()[-2_000:]
    row["seconds"] = round(time.monotonic() - began, 1)
    results.write(row)
    cases = results.of(name)
    wrong = [case for case in cases if not is_right(cases[case])]
    for case in wrong:
        print(f"  {case}: {json.dumps({**cases[case], 'trace': ''})[:400]}")
    end = "" if row["ended"] else f", not all of it: {row['error'][-300:]}"
    print(f"{name}: {len(cases) - len(wrong)} of {len(cases)} right, {row['seconds']:g} s{end}", flush=True)


def _one_round(results: Results, name: str, deadline: float, said: IO[str]) -> bool:
    """Whether the processes of a piece have tried all of it."""
    words = [sys.executable, "-m", "benchmarks.gpu_check", f"--work={name}", f"--json={results.file}"]
    words += ["--tiny"] * results.setting["tiny"]
    environment = dict(os.environ)
    if not results.setting["driver"]:
        environment["TRITON_INTERPRET"] = "1"
    processes = [
        subprocess.Popen(
            [*words, f"--number={number}"], stdout=said, stderr=said, env=environment, start_new_session=True
        )
        for number in range(_processes(results, name))
    ]
    ended = [_ended(process, deadline) for process in processes]
    return all(ended)


def _processes(results: Results, name: str) -> int:
    return 1 if results.setting["tiny"] else PIECES[name].processes


def _ended(process: subprocess.Popen[bytes], deadline: float) -> bool:
    """Whether it ended as it should; what it has started ends with it."""
    try:
        return process.wait(max(0.0, deadline - time.monotonic())) == 0
    except subprocess.TimeoutExpired:
        for number in (signal.SIGTERM, signal.SIGKILL):
            os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
                break
        return False


def _work(results: Results, name: str, number: int) -> int:
    """Carry out this process's share of the cases that are to be done; 1 where a fault leaves it without a GPU."""
    die_with_parent()
    piece = PIECES[name]
    function = getattr(importlib.import_module(piece.module), piece.function)
    cases: dict[str, Callable[[], Row]] = function(tiny=results.setting["tiny"])
    before, start = results.of(name), results.read()[1]
    for case in list(cases)[number :: _processes(results, name)]:
        if case in before and (is_right(before[case]) or before[case]["start"] == start):
            continue
        of = {"piece": name, "case": case}
        results.write({**of, "error": "it did not end"})
        began = time.perf_counter()
        try:
            row = cases[case]()
        except Exception as error:  # time on a GPU is short: what can still be done is
            row = {"error": f"{type(error).__name__}: {error}"[:2_000], "trace": traceback.format_exc()[-4_000:]}
        results.write({**of, **row, "case_s": round(time.perf_counter() - began, 2)})
        if "error" in row and not _gpu_answers():
            return 1
    return 0


def _gpu_answers() -> bool:
    """Whether this process can still use it: after a fault in a kernel every call fails."""
    try:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def _take_over(file: Path) -> int:
    """Bring what a file has, of every setting with a GPU, into the record and the results of this tree."""
    for start in (row for row in map(json.loads, file.read_text().splitlines()) if "setting" in row):
        if start["setting"]["driver"] and not start["setting"]["tiny"]:
            _keep(Results(file, start["setting"]), start["around"])
    return 0


def _keep(results: Results, around: Mapping[str, Any]) -> None:
    """Into the record what is known so far, and into the results what has targets: the ratios of an H200."""
    keep_record(results.setting["device"], record_from(results))
    ratios = _of_ratios(results, "ratios")
    if "H200" in results.setting["device"] and ratios:
        file_finding(Measured((), ratios, {}, (), case="h200", question=QUESTION, setting=Setting(**around)))


def record_from(results: Results) -> GpuRecord:
    """Kernels and captured steps where all cases were tried, tiles and times of whatever there is."""
    kernels = results.of("kernels") if results.ended("kernels") else {}
    captured = results.of("captured") if results.ended("captured") else {}
    timed = [row for row in results.of("tiles").values() if "tiles" in row]
    return GpuRecord(
        **{name: results.setting[name] for name in ("driver", "torch", "triton", "commit")},
        kernels={case: _outcome(row) for case, row in kernels.items()},
        captured_steps=all(map(is_right, captured.values())) if captured else None,
        # The last of a key counts, which is the fastest.
        tiles={row["key"]: row["tiles"] for row in sorted(timed, key=lambda row: -row["seconds"])},
        ratios=_of_ratios(results, "record"),
    )


def _of_ratios(results: Results, part: str) -> dict[str, Any]:
    return {name: value for row in results.of("ratios").values() for name, value in row.get(part, {}).items()}


def _outcome(row: Row) -> float | str:
    """The worst error, or the words of what is wrong."""
    worst = max(row.get("errors", {"": 0.0}).values())
    return float(worst) if is_right(row) else row.get("error", f"errors of {worst:.2g}").splitlines()[0]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
