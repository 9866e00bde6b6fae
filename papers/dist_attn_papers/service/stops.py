"""Ranks of a service are stopped (SIGSTOP) while streams are open: is it noticed in time, and is every answer the same?

`dist-attn bench service-stops BOOK --ranks 4 --stops 10` starts a service of its own with its default deadlines,
takes every answer once in peace, and then over and over while one rank at a time is stopped, in turn during the reading
of texts and during drawing. Promised is that `/readyz` is a 503 that names the rank within 5 s.
"""

import asyncio
import json
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from dist_attn_papers.service.program import own_service, parser_of
from tests.support.streams import Stream, streams_of
from tests.support.whole_service import until_ready

__all__ = ["PROMISED_S", "Stop", "Stops", "main", "observe"]

PROMISED_S = 5.0
SILENCE_S, RECOVERY_S, LOOK_S = 300.0, 120.0, 0.02


@dataclass(frozen=True)
class Stop:
    """One rank that was stopped. Units: seconds from the signal on.

    `noticed_s` is until `/readyz` was a 503, `named` whether that named the rank, `ready_s` until it was a 200 again,
    `rows_s` until a row or a piece of text came after that.
    """

    rank: int
    during: str
    open_streams: int
    noticed_s: float
    named: bool
    ready_s: float
    rows_s: float
    replayed_tokens: int


@dataclass
class Stops:
    """What was seen of all of them, and the answers that came back meanwhile."""

    stops: list[Stop] = field(default_factory=list)
    equal: int = 0
    different: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    false_alarms: int = 0

    @property
    def kept(self) -> bool:
        """Whether all of it is as promised."""
        seen = all(stop.named and stop.noticed_s <= PROMISED_S for stop in self.stops)
        return seen and not (self.different or self.errors or self.false_alarms)

    def as_json(self) -> dict[str, Any]:
        """The result in figures."""
        seconds = {name: [getattr(stop, name) for stop in self.stops] for name in ("noticed_s", "ready_s", "rows_s")}
        return {
            "stops": len(self.stops),
            "named": sum(stop.named for stop in self.stops),
            "promised_s": PROMISED_S,
            **{f"{name}_median": round(median(found), 2) for name, found in seconds.items() if found},
            **{f"{name}_max": round(max(found), 2) for name, found in seconds.items() if found},
            "answers_equal": self.equal,
            "answers_different": self.different,
            "errors": self.errors,
            "false_alarms": self.false_alarms,
            "each": [asdict(stop) for stop in self.stops],
        }


class _Round:
    """Streams of one kind that are open while a rank is stopped."""

    def __init__(self, http: httpx.AsyncClient, streams: Sequence[Stream]) -> None:
        self.streams = streams
        self.came_at = 0.0
        self._moved = asyncio.Event()
        self._tasks = [asyncio.create_task(stream.digest(http, self._came)) for stream in streams]

    def _came(self) -> None:
        self.came_at = time.monotonic()
        self._moved.set()

    async def moving(self) -> float:
        """Wait until something comes from now on; when it came.

        Raises: RuntimeError when every stream has ended before.
        """
        self._moved.clear()
        moved = asyncio.create_task(self._moved.wait())
        ended = asyncio.gather(*self._tasks, return_exceptions=True)
        either: set[asyncio.Future[Any]] = {moved, ended}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not self._moved.is_set():
            moved.cancel()
            raise RuntimeError("every stream had ended before the rank was stopped: give them more to do")
        return self.came_at

    async def answers(self) -> list[str | BaseException]:
        """The digests, or what went wrong."""
        return await asyncio.gather(*self._tasks, return_exceptions=True)


async def _stop(http: httpx.AsyncClient, chance: random.Random, during: str, work: _Round) -> Stop:
    status = await until_ready(http, 0, RECOVERY_S)
    victim = chance.choice(status["ranks"])
    await work.moving()
    await asyncio.sleep(chance.uniform(0.0, 0.1))
    os.kill(victim["pid"], signal.SIGSTOP)
    began = time.monotonic()
    reason = ""
    while not reason:
        if time.monotonic() - began > RECOVERY_S:
            raise TimeoutError(f"rank {victim['rank']} was stopped and nobody noticed for {RECOVERY_S:g} s")
        answer = await http.get("/readyz")
        if answer.status_code == 503:
            reason = answer.json()["detail"]
        else:
            await asyncio.sleep(LOOK_S)
    noticed = time.monotonic() - began
    moving = asyncio.create_task(work.moving())
    after = await until_ready(http, status["epoch"] + 1, RECOVERY_S)
    ready = time.monotonic() - began
    rows = await moving - began
    named = f"rank {victim['rank']} " in reason
    again = after["replayed_tokens"] - status["replayed_tokens"]
    seconds = (round(value, 2) for value in (noticed, ready, rows))
    noticed, ready, rows = seconds
    return Stop(victim["rank"], during, len(work.streams), noticed, named, ready, rows, again)


async def observe(url: str, streams: Sequence[Stream], stops: int, seed: int = 0) -> Stops:
    """Stop a rank so many times, in turn while texts are read and while tokens are drawn.

    Raises: TimeoutError for a rank that nobody misses, or that is not replaced.
    """
    chance, found = random.Random(seed), Stops()
    reading = [stream for stream in streams if not stream.max_tokens]
    drawing = [stream for stream in streams if stream.max_tokens]
    kinds = {during: some for during, some in (("reading", reading), ("drawing", drawing)) if some}
    async with httpx.AsyncClient(base_url=url, timeout=SILENCE_S, limits=httpx.Limits(max_connections=100)) as http:
        before = await until_ready(http, 0, RECOVERY_S)
        wanted = dict(zip(streams, await asyncio.gather(*(s.digest(http) for s in streams)), strict=True))
        # work at full speed is no reason to think that a rank has gone
        found.false_alarms = (await until_ready(http, 0, RECOVERY_S))["epoch"] - before["epoch"]
        for number in range(stops):
            during = list(kinds)[number % len(kinds)]
            work = _Round(http, kinds[during])
            found.stops.append(await _stop(http, chance, during, work))
            print(f"stop {number + 1} of {stops}: {asdict(found.stops[-1])}", file=sys.stderr, flush=True)
            for stream, answer in zip(work.streams, await work.answers(), strict=True):
                if isinstance(answer, BaseException):
                    found.errors.append(f"{stream.name}: {answer!r}")
                elif answer == wanted[stream]:
                    found.equal += 1
                else:
                    found.different.append(stream.name)
    return found


def main(arguments: Sequence[str]) -> int:
    """The exit code: 0 when everything was as promised, else 1; 2 for input that is missing."""
    parser = parser_of("service-stops", __doc__, ranks=4)
    parser.add_argument("book", type=Path)
    parser.add_argument("--stops", type=int, default=10)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--bytes", type=int, default=2_000_000, help="of the book, shared by the streams")
    parser.add_argument("--max-tokens", type=int, default=800)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    try:
        book = given.book.read_bytes()[: given.bytes].decode(errors="ignore")
    except OSError as error:
        print(f"service_stops: {given.book} cannot be read: {error.strerror}", file=sys.stderr)
        return 2
    with own_service(given.model, given.ranks) as service:
        streams = streams_of(book, given.streams, given.max_tokens)
        found = asyncio.run(observe(service.url, streams, given.stops, given.seed))
    result = json.dumps(found.as_json(), indent=1)
    print(result)
    given.json.write_text(result)
    return int(not found.kept)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
