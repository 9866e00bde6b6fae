"""Decoding and short requests beside a text of a million tokens: the time between tokens against an idle engine's.

`python -m dist_attn_papers.service.fairness --ranks 1 2` starts a service for each number of ranks, lets some streams
decode alone, then beside the reading of one long text, which is also read alone; in turns, so that what else the
machine does meets all alike.
"""

import argparse
import asyncio
import json
import random
import re
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from operator import attrgetter
from pathlib import Path
from statistics import quantiles

import httpx

from benchmarks.setting import Setting, look_around
from dist_attn_papers.service.program import own_service

__all__ = ["TESTS", "Fairness", "Plan", "Row", "main", "measure", "observe"]

NAME = "service-fairness"
QUESTION = "What do sessions and jobs get while others are busy?"
TESTS = ("tests/control/test_scheduler.py", "tests/rank/test_interleaving.py")
SILENCE_S, LOOK_AGAIN_S = 120.0, 0.02
ROW = re.compile(r'\{"index":\d+,"start":\d+,"stop":(\d+)')
WORDS = ("the", "of", "and", "to", "in", "a", "that", "it", "was", "his", "he", "with", "as", "had", "for", "her")


@dataclass(frozen=True)
class Plan:
    """What is done. Units: seconds; `tokens` are about as many as the long text has."""

    model: str = "books-6m"
    tokens: int = 1 << 20
    streams: int = 4
    turns: int = 3
    seconds: float = 10.0  # of each part of a turn
    settle_s: float = 2.0  # before each part counts
    short_every_s: float = 2.0


@dataclass(frozen=True)
class Row:
    """One number of ranks. Units: milliseconds between tokens, seconds, tokens per second."""

    ranks: int
    idle_p50_ms: float
    idle_p99_ms: float
    beside_p50_ms: float
    beside_p99_ms: float
    first_token_idle_s: float
    first_token_beside_median_s: float
    first_token_beside_max_s: float
    short_requests: int
    reading_alone: float
    reading_beside: float
    gaps_idle_ms: tuple[float, ...] = ()  # percentiles 1 to 99
    gaps_beside_ms: tuple[float, ...] = ()

    @property
    def p99_times_idle(self) -> float:
        """How many times longer the longest waits are beside the reading."""
        return self.beside_p99_ms / self.idle_p99_ms

    @property
    def reading_kept(self) -> float:
        """The part of the speed of reading that is left beside decoding."""
        return self.reading_beside / self.reading_alone


@dataclass(frozen=True)
class Fairness:
    """All numbers of ranks, measured."""

    setting: Setting
    plan: Plan
    rows: tuple[Row, ...]
    case: str = NAME

    def as_json(self) -> str:
        """The result for machines."""
        return json.dumps({"object": "benchmark", **asdict(self)}, indent=2) + "\n"

    def as_markdown(self) -> str:
        """The result for people."""
        plan = self.plan
        lines = [
            "# service-fairness",
            "",
            f"{plan.streams} streams decode beside the reading of one text of about {plan.tokens:,} tokens. Promised: "
            "p99 between tokens at most 3 x idle, first token of a short request within 2 s, half of its speed.",
            "",
            self.setting.sentence(),
            f"Model {plan.model}; {plan.turns} turns of idle, beside and alone, {plan.seconds:g} s each, over HTTP.",
            "",
            "| ranks | idle p50 | idle p99 | beside p50 | beside p99 | p99 x idle | first token idle | beside median | "
            "beside max | reading alone | beside | kept |",
            "|---|---|---|---|---|---|---|---|---|---|---|---|",
        ]
        for row in self.rows:
            gaps = (row.idle_p50_ms, row.idle_p99_ms, row.beside_p50_ms, row.beside_p99_ms)
            firsts = (row.first_token_idle_s, row.first_token_beside_median_s, row.first_token_beside_max_s)
            cells = [str(row.ranks), *(f"{gap:.1f} ms" for gap in gaps), f"{row.p99_times_idle:.2f}"]
            cells += [f"{first:.2f} s" for first in firsts]
            cells += [f"{speed:,.0f}/s" for speed in (row.reading_alone, row.reading_beside)]
            lines.append(f"| {' | '.join([*cells, f'{row.reading_kept:.2f}'])} |")
        return "\n".join(lines) + "\n"

    def draw(self, path: Path) -> None:
        """How long one waits for the next token: idle and beside the reading."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7.0, 4.5), layout="constrained")
        axes = figure.add_subplot()
        for row in self.rows:
            for name, gaps in (("idle", row.gaps_idle_ms), ("beside", row.gaps_beside_ms)):
                axes.plot(gaps, range(1, len(gaps) + 1), label=f"{row.ranks} ranks, {name}")
        axes.set_xlabel("ms between two tokens")
        axes.set_ylabel("percent of waits that are shorter")
        axes.set_xscale("log")
        axes.grid(True, alpha=0.3)
        axes.legend()
        figure.savefig(path, dpi=110)


@dataclass
class _Seen:
    """What came while it counted."""

    counting: bool = False
    gaps: list[float] = field(default_factory=list)
    firsts: list[float] = field(default_factory=list)
    marks: list[tuple[float, int]] = field(default_factory=list)  # when rows came, and up to which token

    @property
    def decoded_enough(self) -> bool:
        """Whether there is a wait and a first token to count."""
        return bool(self.gaps and self.firsts)

    @property
    def read_enough(self) -> bool:
        """Whether rows came at two times, between which the speed is that of the reading."""
        return len(self.marks) > 1 and self.marks[-1] > self.marks[0]

    @property
    def tokens_per_second(self) -> float:
        """Between the first row of this part and the last one."""
        (began, first), (ended, last) = self.marks[0], self.marks[-1]
        return (last - first) / (ended - began)


def _text(tokens: int, seed: int) -> str:
    """Words of which the shipped tokeniser has one token each, the space before it included."""
    chance = random.Random(seed)
    return " ".join(chance.choices(WORDS, k=tokens))


async def _decode(http: httpx.AsyncClient, number: int, seen: list[_Seen]) -> None:
    """One stream after the other, until it is cancelled; the newest part of the measurement counts the waits."""
    while True:
        body = {"prompt": _text(30, number), "max_tokens": 2000, "temperature": 1.0, "stream": True, "seed": number}
        before = None
        async for at in _tokens(http, body):
            if before is not None and seen[-1].counting:
                seen[-1].gaps.append(at - before)
            before = at


async def _tokens(http: httpx.AsyncClient, body: dict[str, object]) -> AsyncIterator[float]:
    """When each piece of text came.

    Raises: RuntimeError for an error in the stream.
    """
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise RuntimeError(event["error"])
                if event["choices"][0]["text"]:
                    yield time.perf_counter()


async def _ask_short(http: httpx.AsyncClient, every_s: float, seen: list[_Seen]) -> None:
    """A short request now and then: how long until its first token."""
    number = 0
    while True:
        await asyncio.sleep(every_s)
        number += 1
        part, began = seen[-1], time.perf_counter()
        body: dict[str, object] = {"prompt": _text(200, -number), "max_tokens": 3, "stream": True, "seed": 1}
        first = None
        async for at in _tokens(http, body):
            first = at if first is None else first
        if part.counting and first is not None:
            part.firsts.append(first - began)


async def _read(http: httpx.AsyncClient, text: bytes, seen: list[_Seen], began: asyncio.Event) -> None:
    """Read the long text, again and again until it is cancelled; `began` is set with the first row."""
    headers = {"content-type": "text/plain"}
    before = row_end = 0  # tokens of the readings that are done, and of the one under way
    while True:
        before, row_end = before + row_end, 0
        async with http.stream("POST", "/v1/encodings", content=text, headers=headers) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if line.startswith('{"object":"error"'):
                    raise RuntimeError(line)
                # Not as JSON: the vector of a row is long, and this process shares the cores.
                began.set()
                if row := ROW.match(line):
                    row_end = int(row[1])
                    if seen[-1].counting:
                        seen[-1].marks.append((time.perf_counter(), before + row_end))


@asynccontextmanager
async def _working(*works: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Do these works until the block ends; where one of them fails, the block ends at once with its error."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
            yield
            for task in tasks:
                task.cancel()
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def _count(seen: list[_Seen], plan: Plan, enough: Callable[[_Seen], bool]) -> None:
    """Count for the seconds of a part, and on a slow machine until there is enough to tell.

    Raises: TimeoutError where that takes more than SILENCE_S.
    """
    await asyncio.sleep(plan.settle_s)
    seen[-1].counting = True
    await asyncio.sleep(plan.seconds)
    async with asyncio.timeout(SILENCE_S):
        while not enough(seen[-1]):  # noqa: ASYNC110 - what comes in has no event
            await asyncio.sleep(LOOK_AGAIN_S)
    seen.append(_Seen())


async def observe(url: str, ranks: int, plan: Plan) -> Row:
    """All turns against the service at `url`."""
    text = _text(plan.tokens, 0).encode()
    idle, beside = [_Seen()], [_Seen()]
    speeds: list[tuple[float, float]] = []
    decoded, read = attrgetter("decoded_enough"), attrgetter("read_enough")

    def decoders(seen: list[_Seen]) -> list[Coroutine[None, None, None]]:
        return [*(_decode(http, n, seen) for n in range(plan.streams)), _ask_short(http, plan.short_every_s, seen)]

    limits = httpx.Limits(max_connections=plan.streams + 4)
    async with httpx.AsyncClient(base_url=url, timeout=SILENCE_S, limits=limits) as http:
        for _ in range(plan.turns):
            async with _working(*decoders(idle)):
                await _count(idle, plan, decoded)
            reading, began = [_Seen()], asyncio.Event()
            async with _working(_read(http, text, reading, began)):
                await asyncio.wait_for(began.wait(), SILENCE_S)
                async with _working(*decoders(beside)):
                    await asyncio.gather(_count(beside, plan, decoded), _count(reading, plan, read))
                await _count(reading, plan, read)
            speeds.append((reading[0].tokens_per_second, reading[1].tokens_per_second))
    return _row(ranks, idle, beside, speeds)


def _row(ranks: int, idle: list[_Seen], beside: list[_Seen], speeds: list[tuple[float, float]]) -> Row:
    waits = [_percentiles([1e3 * gap for part in seen for gap in part.gaps]) for seen in (idle, beside)]
    firsts = [sorted(first for part in seen for first in part.firsts) for seen in (idle, beside)]
    return Row(
        ranks=ranks,
        idle_p50_ms=waits[0][49],
        idle_p99_ms=waits[0][98],
        beside_p50_ms=waits[1][49],
        beside_p99_ms=waits[1][98],
        first_token_idle_s=firsts[0][len(firsts[0]) // 2],
        first_token_beside_median_s=firsts[1][len(firsts[1]) // 2],
        first_token_beside_max_s=firsts[1][-1],
        short_requests=len(firsts[1]),
        reading_alone=sum(alone for _, alone in speeds) / len(speeds),
        reading_beside=sum(beside for beside, _ in speeds) / len(speeds),
        gaps_idle_ms=waits[0],
        gaps_beside_ms=waits[1],
    )


def _percentiles(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(round(value, 2) for value in quantiles(values, n=100, method="inclusive"))


def _observe_ranks(ranks: int, plan: Plan) -> Row:
    with own_service(plan.model, ranks) as service:
        return asyncio.run(observe(service.url, ranks, plan))


def measure(smoke: bool, plan: Plan | None = None, ranks: Sequence[int] = (1, 2)) -> Fairness:
    """The study; with `smoke` one rank and a moment of everything."""
    if smoke:
        plan, ranks = Plan(tokens=1 << 16, turns=1, seconds=3.0, settle_s=0.5, short_every_s=0.5), (1,)
    plan = plan or Plan()
    setting = look_around()
    return Fairness(setting, plan, tuple(_observe_ranks(number, plan) for number in ranks))


def main(arguments: Sequence[str]) -> int:
    """Measure with other values than `dist-attn bench service-fairness`, print and write; the exit code 0."""
    parser = argparse.ArgumentParser(prog="python -m dist_attn_papers.service.fairness", description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=(1, 2))
    for name, default in asdict(Plan()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    parser.add_argument("--json", type=Path)
    given = vars(parser.parse_args(arguments))
    ranks, path = given.pop("ranks"), given.pop("json")
    found = measure(False, Plan(**given), ranks)
    print(found.as_markdown())
    if path is not None:
        path.write_text(found.as_json())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
