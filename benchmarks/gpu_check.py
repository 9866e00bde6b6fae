"""`make gpu`: everything that is to be known on a machine with a GPU, in pieces that each survive the end of time.

    python -m benchmarks.gpu --part 1 [--json F]     on a GPU: what is worth most, in six minutes
    python -m benchmarks.gpu --part 2 [--json F]     the rest, in five
    python -m benchmarks.gpu --only PIECE … [--seconds 60]
    python -m benchmarks.gpu --tiny                  without one: that all of it runs
    python -m benchmarks.gpu --read F                bring into this tree the results of another copy

A piece runs in processes of its own, which end at its deadline, and each case is a line of F as soon as it is done. A
later start with the same F, at the same commit on the same GPU, goes on with what is missing, failed or was wrong.
What is known then goes into the record that `auto` goes by (`dist_attn.ops.gpu_record`) and into the results that the
page of measurements is made of, piece by piece, by the name of the GPU.
"""

import argparse
import contextlib
import importlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch

from benchmarks.gpu.cases import Row, have_interpreter_count
from benchmarks.gpu.results import DID_NOT_END, Results, is_right, keep, take_over
from benchmarks.setting import look_around, own_cores
from dist_attn.rank_link.tether import die_with_parent

__all__ = ["PIECES", "main"]

END_S = 5.0  # for commands to end what they have started


@dataclass(frozen=True)
class Piece:
    """Cases that `processes` share: a function of a module that makes them, and seconds of its part.

    `beside`: nothing of it is timed, so it runs beside its neighbours that are so too. `program`: the module that its
    processes start, which knows the piece.
    """

    part: int
    module: str
    function: str
    seconds: float
    processes: int = 1
    beside: bool = False
    program: str = "benchmarks.gpu_check"


# What is worth most first. flash-linear-attention's kernels last: it compiles hundreds to choose from.
PIECES = {
    # Each case compiles kernels of its own, for which the GPU waits.
    "kernels": Piece(1, "tests.gpu.kernel_cases", "kernel_cases", 100, processes=16),
    "captured": Piece(1, "tests.gpu.model_cases", "captured_cases", 25, processes=2),
    "ratios": Piece(1, "benchmarks.gpu.speed", "ratio_cases", 55),
    "training": Piece(1, "tests.gpu.model_cases", "training_cases", 65),
    "profile": Piece(1, "benchmarks.gpu.profile", "profile_cases", 40),
    "peers": Piece(1, "benchmarks.gpu.speed", "peer_cases", 60),
    "decode": Piece(2, "benchmarks.gpu.models", "decode_cases", 30),
    "encode": Piece(2, "benchmarks.gpu.models", "encode_cases", 40),
    "served": Piece(2, "tests.gpu.service_cases", "served_cases", 110, beside=True),
    "killed": Piece(2, "tests.gpu.service_cases", "killed_cases", 110, beside=True),
    "ranks": Piece(2, "tests.gpu.rank_cases", "rank_cases", 110, processes=4, beside=True),
    "adapted": Piece(2, "tests.gpu.adapted_cases", "adapted_cases", 110, processes=3, beside=True),
    "affine": Piece(2, "tests.gpu.affine_cases", "affine_cases", 25, processes=8),
    "fla": Piece(2, "tests.gpu.fla_cases", "fla_cases", 45, processes=16),
    "fla-times": Piece(2, "benchmarks.gpu.speed", "fla_time_cases", 40),
    "long-texts": Piece(0, "tests.gpu.adapted_cases", "long_text_cases", 75),
    "tiles": Piece(0, "benchmarks.gpu.speed", "tile_cases", 60, processes=8),
}


def main(arguments: Sequence[str]) -> int:
    """Exit status 1 where something failed, is wrong or is missing; 2 without a GPU."""
    options = _parser().parse_args(arguments)
    if options.read is not None:
        take_over(options.read)
        return 0
    if not torch.cuda.is_available() and not options.tiny:
        print("gpu_check: there is no GPU here; --tiny shows that all of it runs", file=sys.stderr)
        return 2
    results = Results(options.json, _setting(tiny=options.tiny))
    if options.work:
        return _work(results, options.work, options.number, options.cases)
    around = asdict(look_around())
    results.write({"setting": results.setting, "around": around})
    wanted = _wanted(options)
    # What an earlier call has found, on a machine that is bare again.
    kept = not results.read()[0] or _keep(results, around)
    missing = [name for name in wanted if not results.is_right(name)]
    groups = [tuple(names) for _, names in itertools.groupby(missing, _turn)]
    seconds = [max(PIECES[name].seconds for name in names) for names in groups]
    ends = time.monotonic() + (sum(seconds) if options.seconds is None else options.seconds)
    for number, names in enumerate(groups):
        # What a piece leaves of its time is for those after it.
        own = (ends - time.monotonic()) * seconds[number] / sum(seconds[number:])
        with ThreadPoolExecutor(len(names)) as together:
            list(together.map(partial(_run, results, seconds=own, chosen=options.cases), names))
        kept = _keep(results, around)
    right = all(map(results.is_right, wanted)) or (
        bool(options.cases) and all(is_right(row) for name in wanted for row in results.of(name).values())
    )
    return 0 if kept and right else 1


def _turn(name: str) -> str:
    return "beside each other" if PIECES[name].beside else name


def _wanted(options: argparse.Namespace) -> list[str]:
    parts = (1, 2) if options.part is None else (options.part,)
    asked = options.only or [name for name, piece in PIECES.items() if piece.part in parts]
    return [name for name in PIECES if name in asked or (options.tune and name == "tiles")]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description="Check and measure a GPU.")
    parser.add_argument("--json", type=Path, metavar="F", default=Path("gpu-check.jsonl"), help="default: %(default)s")
    parser.add_argument("--part", type=int, choices=(1, 2), help="one of two calls, the first of which is worth more")
    parser.add_argument("--seconds", type=float, help="for all pieces together (default: the sum of theirs)")
    parser.add_argument("--only", nargs="+", choices=PIECES, help="these pieces")
    parser.add_argument("--cases", nargs="+", default=[], metavar="WORDS", help="only cases with any of these in them")
    parser.add_argument("--tune", action="store_true", help="measure tiles too, last")
    parser.add_argument("--tiny", action="store_true", help="the smallest sizes, also without a GPU")
    parser.add_argument("--read", type=Path, metavar="F", help="bring what a file has into record and results")
    parser.add_argument("--work", choices=PIECES, help=argparse.SUPPRESS)  # this process carries out a piece,
    parser.add_argument("--number", type=int, default=0, help=argparse.SUPPRESS)  # as which of its processes
    return parser


def _keep(results: Results, around: Mapping[str, Any]) -> bool:
    """Whether what is known could be filed; if not, it stays in the file and the other pieces go on."""
    try:
        if not results.setting["tiny"]:
            keep(results, around)
    except Exception as error:
        print(f"not filed yet: {type(error).__name__}: {error}; --read {results.file} tries again", flush=True)
        return False
    return True


def _setting(*, tiny: bool) -> dict[str, Any]:
    """What results hold for."""
    import triton

    device, driver = "cpu", ""
    if torch.cuda.is_available():
        driver = _driver()
        device = torch.cuda.get_device_name()
    versions = {"torch": str(torch.__version__), "triton": triton.__version__, "commit": look_around().commit}
    return {"device": device, "driver": driver, **versions, "tiny": tiny}


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.split("\n")[0]


def _run(results: Results, name: str, seconds: float, chosen: Sequence[str] = ()) -> None:
    """Let processes carry a piece out until it is done or its time is over."""
    began = time.monotonic()
    print(f"{name}: at most {seconds:.0f} s", flush=True)
    row: Row = {"piece": name, "case": "", "ended": False}
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        tried = -1
        while not row["ended"] and len(results.of(name)) > tried and time.monotonic() < began + seconds:
            # A fault in a kernel takes its process along: another one goes on behind the case that did it.
            tried = len(results.of(name))
            row["ended"] = _one_round(results, name, began + seconds, said, chosen)
        if not row["ended"]:
            said.seek(0)
            row["error"] = said.read()[-2_000:]
    row["seconds"] = round(time.monotonic() - began, 1)
    # Of some cases the piece is not done with, and the record keeps what it knows.
    results.write({**row, "ended": row["ended"] and not chosen, "cases": results.all_of(name)})
    cases = results.of(name)
    wrong = [case for case in cases if not is_right(cases[case])]
    for case in wrong:
        print(f"  {case}: {json.dumps({**cases[case], 'trace': ''})[:400]}")
    end = "" if row["ended"] else f", not all of it: {row['error'][-300:]}"
    print(f"{name}: {len(cases) - len(wrong)} of {len(cases)} right, {row['seconds']:g} s{end}", flush=True)


def _one_round(results: Results, name: str, deadline: float, said: IO[str], chosen: Sequence[str]) -> bool:
    """Whether the processes of a piece have tried all of it."""
    words = [sys.executable, "-m", PIECES[name].program, f"--work={name}", f"--json={results.file}"]
    words += ["--tiny"] * results.setting["tiny"] + ["--cases", *chosen] * bool(chosen)
    # Of a machine with many cores each takes its share.
    environment = {"OMP_NUM_THREADS": str(max(1, len(own_cores()) // PIECES[name].processes)), **os.environ}
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


def _work(results: Results, name: str, number: int, chosen: Sequence[str]) -> int:
    """Carry out this process's share of the cases that are to be done; 1 where a fault leaves it without a GPU."""
    die_with_parent()
    if not results.setting["driver"]:
        have_interpreter_count()
        importlib.import_module("tests.support.interpreter").look_once()
    piece = PIECES[name]
    function = getattr(importlib.import_module(piece.module), piece.function)
    cases: dict[str, Callable[[], Row]] = function(tiny=results.setting["tiny"])
    before, start = results.of(name), results.read()[1]
    if number == 0:
        results.write({"piece": name, "case": "", "cases": list(cases)})
    wanted = [case for case in cases if not chosen or any(word in case for word in chosen)]
    for case in wanted[number :: _processes(results, name)]:
        if case in before and (is_right(before[case]) or before[case]["start"] == start):
            continue
        of = {"piece": name, "case": case}
        results.write({**of, "error": DID_NOT_END})
        began = time.perf_counter()
        try:
            row = cases[case]()
        except Exception as error:  # time on a GPU is short: what can still be done is
            row = {"error": f"{type(error).__name__}: {error}"[:2_000], "trace": traceback.format_exc()[-4_000:]}
        results.write({**of, **row, "case_s": round(time.perf_counter() - began, 2)})
        if not _gpu_answers():
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
