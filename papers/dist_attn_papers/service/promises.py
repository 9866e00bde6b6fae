"""What the service promises, measured one after the other: `dist-attn bench service-promises BOOK`.

Each measurement is a module of its own that starts a service in processes of its own; about forty minutes for all on
two cores. Results are filed as `benchmarks/results/service-NAME.json`. Printed is every promise with its number and
what other servers do; `--report` prints what is filed and measures nothing.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.filed import RESULTS
from benchmarks.report import file_finding
from benchmarks.setting import ROOT, Setting, look_around, why_red
from dist_attn_papers.service.promised import PROMISES, HeldByTests, Promise

__all__ = ["MEASUREMENTS", "Measured", "Measurement", "as_markdown", "file_measurement", "filed_measurements", "main"]

MOST_S = 3600.0


@dataclass(frozen=True)
class Measurement:
    """A module, what it is given, and the tests that must be green before; `{book}` is the text to read."""

    module: str
    arguments: tuple[str, ...]
    tests: tuple[str, ...] = ()

    def command(self, book: Path) -> tuple[str, ...]:
        """What comes behind the interpreter."""
        return ("-m", self.module, *(argument.format(book=book) for argument in self.arguments))


_HOLDING = tuple(dict.fromkeys(t for promise in PROMISES if isinstance(promise, HeldByTests) for t in promise.tests))
# SIGSTOP has a measurement of its own, so kills are all SIGKILL.
MEASUREMENTS: Mapping[str, Measurement] = {
    "kills": Measurement(
        "dist_attn_papers.service.kills",
        ("{book}", "--ranks=4", "--kills=50", "--streams=8", "--stop-every=0"),
        ("tests/control/test_group.py", "tests/control/test_replay.py"),
    ),
    "stops": Measurement(
        "dist_attn_papers.service.stops",
        ("{book}", "--ranks=4", "--stops=10", "--streams=8"),
        ("tests/control/test_group.py", "papers/tests/test_service.py"),
    ),
    "sessions": Measurement(
        "dist_attn_papers.service.sessions",
        ("--tokens=1000000", "--bytes-per-token=5", "--kills=20"),
        ("tests/rank/test_stored_sessions.py",),
    ),
    "streaming": Measurement(
        "dist_attn_papers.service.streaming", ("--megabytes=1024",), ("papers/tests/test_service.py",)
    ),
    "fairness": Measurement(
        "dist_attn_papers.service.fairness",
        ("--ranks", "1", "2"),
        ("tests/control/test_scheduler.py", "tests/rank/test_interleaving.py"),
    ),
    "disconnects": Measurement(
        "dist_attn_papers.service.disconnects", ("--ranks=1", "--times=5"), ("tests/service/test_disconnect.py",)
    ),
    "eta": Measurement(
        "dist_attn_papers.service.eta",
        ("{book}", "--ranks=1", "--tokens", "105000", "200000"),
        ("tests/service/test_estimates.py",),
    ),
    "tests": Measurement("dist_attn_papers.service.held_by_tests", _HOLDING),
}


@dataclass(frozen=True)
class Measured:
    """One measurement as it is filed: what its command wrote, and where and when. Units: seconds."""

    case: str
    setting: Setting
    command: str
    seconds: float
    result: Any
    exit_code: int = 0

    @property
    def name(self) -> str:
        """That of the measurement."""
        return self.case.removeprefix("service-")

    def as_json(self) -> str:
        """The result for machines."""
        return json.dumps({"object": "benchmark", **asdict(self)}, indent=1) + "\n"

    def as_markdown(self) -> str:
        """The promises that it is about."""
        about = [promise for promise in PROMISES if promise.measurement == self.name]
        lines = [f"# {self.case}", "", *_judged(about, {self.name: self}), "", *_told([self])]
        return "\n".join(lines) + "\n"


def file_measurement(name: str, book: Path, folder: Path) -> Path:
    """Carry one out and file what it wrote, in place of what was filed of it before.

    Raises: RuntimeError where its tests are red, or it wrote nothing within `MOST_S`.
    """
    measurement, setting = MEASUREMENTS[name], look_around()
    problem = why_red(measurement.tests) if measurement.tests else ""
    if problem:
        raise RuntimeError(f"{name} was not measured: no number without green tests; {problem}")
    command, began = measurement.command(book), time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        written = Path(scratch) / "result.json"
        program = [sys.executable, *command, f"--json={written}"]
        try:
            ended = subprocess.run(program, cwd=ROOT, check=False, timeout=MOST_S).returncode
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{name} did not end within {MOST_S:g} s") from None
        if not written.exists():
            raise RuntimeError(f"{name} ended with exit code {ended} and no result")
        result = json.loads(written.read_text())
    seconds = round(time.monotonic() - began, 1)
    told = " ".join(("python", *measurement.command(Path(book.name))))
    return file_finding(Measured(f"service-{name}", setting, told, seconds, result, ended), folder)


def filed_measurements(folder: Path) -> dict[str, Measured]:
    """What is filed in the folder, by the measurement's name."""
    paths = [folder / f"service-{name}.json" for name in MEASUREMENTS]
    found = [msgspec.json.decode(path.read_bytes(), type=Measured) for path in paths if path.exists()]
    return {one.name: one for one in found}


def as_markdown(results: Mapping[str, Measured]) -> str:
    """The page of promises."""
    lines = [
        "# What the service promises, and what was measured",
        "",
        "`dist-attn bench service-promises BOOK` measures, `--only NAME …` some of it. Numbers are of the machine",
        "that is named below; ranks, service and clients share its cores.",
        "",
        *_judged(PROMISES, results),
        "",
        *_told(results.values()),
    ]
    return "\n".join(lines) + "\n"


def _judged(promises: Sequence[Promise | HeldByTests], results: Mapping[str, Measured]) -> list[str]:
    lines = ["| | promise | measured | kept | what others do |", "|---|---|---|---|---|"]
    for promise in promises:
        measured, kept = "not measured yet", ""
        if promise.measurement in results:
            verdict = promise.judge(results[promise.measurement].result)
            measured, kept = verdict.found, "yes" if verdict.kept else "no"
        lines.append(f"| {promise.name} | {promise.words} | {measured} | {kept} | {promise.others} |")
    return lines


def _told(results: Iterable[Measured]) -> list[str]:
    lines = ["| measurement | command | minutes | where and when |", "|---|---|---|---|"]
    for one in results:
        lines.append(f"| {one.name} | `{one.command}` | {one.seconds / 60:.1f} | {one.setting.sentence()} |")
    return lines


def main(arguments: Sequence[str]) -> int:
    """The exit code: 0 when everything that was to be measured has been, 1 when something could not, 2 for input."""
    parser = argparse.ArgumentParser(
        prog="dist-attn bench service-promises",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("book", type=Path, nargs="?", help="a text of a megabyte or more")
    parser.add_argument("--only", nargs="+", choices=tuple(MEASUREMENTS), default=tuple(MEASUREMENTS), metavar="NAME")
    parser.add_argument("--report", action="store_true", help="print what is filed, and measure nothing")
    parser.add_argument("--results", type=Path, default=ROOT / RESULTS, help="the folder of results")
    given = parser.parse_args(arguments)
    failed = 0
    if not given.report:
        if given.book is None or not given.book.is_file():
            said = "no book was given" if given.book is None else f"there is no file {given.book}"
            print(f"service_promises: {said}; name a text of a megabyte or more", file=sys.stderr)
            return 2
        for name in given.only:
            print(f"service_promises: {name}", file=sys.stderr, flush=True)
            try:
                path = file_measurement(name, given.book.resolve(), given.results)
            except RuntimeError as error:
                print(f"service_promises: {error}", file=sys.stderr, flush=True)
                failed = 1
            else:
                print(f"service_promises: filed as {path.name}", file=sys.stderr, flush=True)
    print(as_markdown(filed_measurements(given.results)))
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
