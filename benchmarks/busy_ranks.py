"""Whether an engine keeps its ranks at work while there is some: the share of time that ranks spend in no step."""

import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import httpx

from benchmarks.measured import Found, Panel, Table
from benchmarks.service_process import ServiceProcess

__all__ = ["NAME", "QUESTION", "TESTS", "Stretch", "measure"]

NAME = "busy-ranks"
QUESTION = (
    "What share of time are ranks idle while work is queued? A service of its own, books-6m, two documents at once, "
    "longer than is measured; ranks report the time of their steps, waiting for each other included."
)
TESTS = ("tests/control/test_scheduler.py", "tests/rank/test_worker.py")
MODEL, RANKS, STRETCHES, STRETCH_S = "books-6m", (1, 2), 5, 8.0
SMOKE_STRETCH_S = 1.5
START_S, SILENCE_S, LOOK_S = 180.0, 60.0, 0.01
SENTENCE = "It was the sort of evening on which nobody asks why the lamps are late, and nobody is told. "
DOCUMENT = SENTENCE * 60_000  # 5.5 MB, minutes of two cores


@dataclass(frozen=True)
class Stretch:
    """Time in which work was queued. Units: seconds; `busy_s` of each rank."""

    seconds: float
    busy_s: tuple[float, ...]

    @property
    def idle_share(self) -> float:
        """Of the rank that was idle most."""
        return 1.0 - min(self.busy_s) / self.seconds


def measure(smoke: bool) -> Found:
    """A stretch after the other, with one rank and with two."""
    ranks, stretch_s = (RANKS[:1], SMOKE_STRETCH_S) if smoke else (RANKS, STRETCH_S)
    found = {number: _stretches(number, 1 if smoke else STRETCHES, stretch_s) for number in ranks}
    ratios = {f"idle share, {_ranks(number)}": round(_whole(one).idle_share, 4) for number, one in found.items()}
    rows = tuple(
        (_ranks(number), f"{stretch.seconds:.2f} s", ", ".join(f"{s:.2f} s" for s in stretch.busy_s), _percent(stretch))
        for number, stretches in found.items()
        for stretch in (*stretches, _whole(stretches))
    )
    curves = {
        _ranks(number): {float(n): max(stretch.idle_share, 1e-4) for n, stretch in enumerate(stretches, 1)}
        for number, stretches in found.items()
    }
    notes = (
        "Stretches follow each other; the last line of each engine is all of them together, which counts. A stretch "
        "begins and ends where a step of the first rank has just been reported.",
    )
    return Found(
        (Table("Stretches", ("ranks", "time", "in steps", "idle"), rows),),
        ratios,
        {},
        (Panel("idle share", "stretch", "of its time", curves),),
        notes,
    )


def _ranks(number: int) -> str:
    return f"{number} rank{'s' * (number > 1)}"


def _percent(stretch: Stretch) -> str:
    return f"{stretch.idle_share:.1%}"


def _whole(stretches: list[Stretch]) -> Stretch:
    of_ranks = zip(*(stretch.busy_s for stretch in stretches), strict=True)
    return Stretch(sum(stretch.seconds for stretch in stretches), tuple(map(sum, of_ranks)))


def _stretches(ranks: int, number: int, stretch_s: float) -> list[Stretch]:
    with (
        tempfile.TemporaryDirectory() as name,
        ServiceProcess(Path(name), ranks=ranks, model=MODEL) as service,
        httpx.Client(base_url=service.url, timeout=SILENCE_S) as http,
    ):
        _until(lambda: http.get("/readyz").status_code == 200, START_S, "ready")
        with _reading(service.url, 2):
            _until(lambda: min(_busy(http, ranks)) > stretch_s / 8, START_S, "at work")
            looks = [_after_a_step(http, ranks)]
            while len(looks) <= number:
                time.sleep(stretch_s)
                looks.append(_after_a_step(http, ranks))
    return [
        Stretch(end - start, tuple(b - a for a, b in zip(before, after, strict=True)))
        for (start, before), (end, after) in pairwise(looks)
    ]


def _after_a_step(http: httpx.Client, ranks: int) -> tuple[float, tuple[float, ...]]:
    """The time at which the first rank has just finished a step, and what the ranks have spent on theirs until then."""
    before = _busy(http, ranks)
    deadline = time.monotonic() + SILENCE_S
    while time.monotonic() < deadline:
        now, busy = time.monotonic(), _busy(http, ranks)
        if busy[0] != before[0]:
            return now, busy
        time.sleep(LOOK_S)
    raise RuntimeError(f"no rank finished a step within {SILENCE_S:g} s")


def _busy(http: httpx.Client, ranks: int) -> tuple[float, ...]:
    """Seconds that each rank has spent on steps.

    Raises: RuntimeError when ranks were lost meanwhile: others would begin at 0 again.
    """
    status = http.get("/v1/status").json()
    if status["lost_groups"] or len(status["ranks"] or ()) != ranks:
        raise RuntimeError(f"{ranks} ranks were started, and some were lost: {status['reason'] or 'the log says why'}")
    return tuple(rank["busy_seconds"] for rank in status["ranks"])


@contextmanager
def _reading(url: str, documents: int) -> Iterator[None]:
    """Documents that are encoded meanwhile; their connections are closed at the end, which ends the work."""
    ended = threading.Event()

    def read() -> None:
        headers = {"content-type": "text/plain"}
        address = f"{url}/v1/encodings"
        with httpx.stream("POST", address, content=DOCUMENT, headers=headers, timeout=SILENCE_S) as answer:
            for _ in answer.iter_lines():
                if ended.is_set():
                    return

    readers = [threading.Thread(target=read, daemon=True) for _ in range(documents)]
    for reader in readers:
        reader.start()
    try:
        yield
    finally:
        ended.set()
        for reader in readers:
            reader.join(SILENCE_S)


def _until(done: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            raise RuntimeError(f"the service was not {what} within {seconds:g} s")
        time.sleep(0.1)
