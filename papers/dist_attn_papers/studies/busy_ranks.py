"""Whether an engine keeps its ranks at work while there is some: the share of time that ranks spend in no step."""

import tempfile
import threading
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import httpx

from benchmarks.measured import Found, Panel, Table
from tests.support.whole_service import ServiceProcess

__all__ = ["NAME", "QUESTION", "TESTS", "Look", "idle_share", "measure"]

NAME = "busy-ranks"
QUESTION = (
    "What share of time are ranks idle while work is queued? A service of its own, books-6m, two documents at once, "
    "longer than is measured; ranks report the time of their steps, waiting for each other included."
)
TESTS = ("tests/control/test_scheduler.py", "tests/rank/test_worker.py")
MODEL, STRETCHES, STRETCH_S = "books-6m", 5, 8.0
SMOKE_STRETCH_S = 1.5
START_S, SILENCE_S, LOOK_S = 180.0, 60.0, 0.01
SENTENCE = "It was the sort of evening on which nobody asks why the lamps are late, and nobody is told. "
DOCUMENT = SENTENCE * 60_000  # 5.5 MB, minutes of two cores


@dataclass(frozen=True)
class Look:
    """A moment at which the first rank has just finished a step. Units: seconds; `busy_s` in steps, of each rank."""

    at: float
    busy_s: tuple[float, ...]


def idle_share(first: Look, last: Look) -> float:
    """What the rank that was idle most was idle of the time between."""
    return 1.0 - min(_worked(first, last)) / (last.at - first.at)


def _worked(first: Look, last: Look) -> list[float]:
    return [after - before for before, after in zip(first.busy_s, last.busy_s, strict=True)]


def measure(smoke: bool) -> Found:
    """A stretch after the other, with one rank and with two."""
    engines = {1: "1 rank"} if smoke else {1: "1 rank", 2: "2 ranks"}
    number, stretch_s = (1, SMOKE_STRETCH_S) if smoke else (STRETCHES, STRETCH_S)
    ratios, curves, rows = {}, {}, []
    for ranks, name in engines.items():
        looks = _looks(ranks, number, stretch_s)
        stretches = list(pairwise(looks))
        for first, last in (*stretches, (looks[0], looks[-1])):
            worked = ", ".join(f"{seconds:.2f} s" for seconds in _worked(first, last))
            rows.append((name, f"{last.at - first.at:.2f} s", worked, f"{idle_share(first, last):.1%}"))
        ratios[f"idle share, {name}"] = round(idle_share(looks[0], looks[-1]), 4)
        curves[name] = {float(n): max(idle_share(*stretch), 1e-4) for n, stretch in enumerate(stretches, 1)}
    notes = (
        "Stretches follow each other; the last line of each engine is all of them together, which counts. A stretch "
        "begins and ends where a step of the first rank has just been reported.",
    )
    table = Table("Stretches", ("ranks", "time", "in steps", "idle"), tuple(rows))
    return Found((table,), ratios, {}, (Panel("idle share", "stretch", "of its time", curves),), notes)


def _looks(ranks: int, stretches: int, stretch_s: float) -> list[Look]:
    """The ends of so many stretches of an engine that reads two documents."""
    ended = threading.Event()
    with (
        tempfile.TemporaryDirectory() as name,
        ServiceProcess(Path(name), ranks=ranks, model=MODEL) as service,
        httpx.Client(base_url=service.url, timeout=SILENCE_S) as http,
    ):
        service.wait_until_ready(START_S)
        readers = [threading.Thread(target=_read, args=(service.url, ended), daemon=True) for _ in range(2)]
        for reader in readers:
            reader.start()
        try:
            looks = [_look_at_work(http, ranks, stretch_s / 8)]
            for _ in range(stretches):
                time.sleep(stretch_s)
                looks.append(_look_at_work(http, ranks))
            return looks
        finally:
            ended.set()
            for reader in readers:
                reader.join(SILENCE_S)


def _read(url: str, ended: threading.Event) -> None:
    """Have a document encoded; the connection is closed at the end, which ends the work."""
    headers, address = {"content-type": "text/plain"}, f"{url}/v1/encodings"
    with httpx.stream("POST", address, content=DOCUMENT, headers=headers, timeout=SILENCE_S) as answer:
        for _ in answer.iter_lines():
            if ended.is_set():
                return


def _look_at_work(http: httpx.Client, ranks: int, least_s: float = 0.0) -> Look:
    """As soon as every rank has worked for `least_s` and the first one has just finished a step.

    Raises: RuntimeError where none does, or ranks were lost meanwhile.
    """
    deadline, before = time.monotonic() + START_S, _busy(http, ranks)
    while time.monotonic() < deadline:
        now, busy = time.monotonic(), _busy(http, ranks)
        if busy[0] != before[0] and min(busy) > least_s:
            return Look(now, busy)
        before = busy
        time.sleep(LOOK_S)
    raise RuntimeError(f"no rank finished a step within {START_S:g} s")


def _busy(http: httpx.Client, ranks: int) -> tuple[float, ...]:
    """Seconds that each rank has spent on steps.

    Raises: RuntimeError when ranks were lost meanwhile: others would begin at 0 again.
    """
    status = http.get("/v1/status").json()
    if status["lost_groups"] or len(status["ranks"] or ()) != ranks:
        raise RuntimeError(f"{ranks} ranks were started, and some were lost: {status['reason'] or 'the log says why'}")
    return tuple(rank["busy_seconds"] for rank in status["ranks"])
