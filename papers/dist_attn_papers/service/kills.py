"""Ranks of a service are killed again and again while streams are open: is every answer the undisturbed one?

`dist-attn bench service-kills BOOK --ranks 4 --kills 50` starts a service of its own, takes every answer once in
peace, and then over and over while `kill -9` (every `--stop-every`th time SIGSTOP) hits a rank at a random moment.
"""

import argparse
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

__all__ = ["Answers", "Kill", "main"]

SILENCE_S, RECOVERY_S = 300.0, 120.0


@dataclass(frozen=True)
class Kill:
    """One rank that was killed: which, in what phase of its work, and how long until all ranks stepped again."""

    rank: int
    phase: str
    signal: str
    open_streams: int
    seconds_to_ready: float
    replayed_tokens: int


@dataclass
class Answers:
    """What came back while ranks were killed."""

    kills: list[Kill] = field(default_factory=list)
    equal: int = 0
    different: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """The result in figures."""
        waits = sorted(kill.seconds_to_ready for kill in self.kills)
        again = [kill.replayed_tokens for kill in self.kills]
        return {
            "kills": len(self.kills),
            "answers_equal": self.equal,
            "answers_different": self.different,
            "errors": self.errors,
            "seconds_to_ready_median": round(median(waits), 2) if waits else None,
            "seconds_to_ready_max": round(waits[-1], 2) if waits else None,
            "replayed_tokens_median": median(again) if again else None,
            "replayed_tokens_max": max(again) if again else None,
            "phases": {phase: sum(k.phase == phase for k in self.kills) for phase in {k.phase for k in self.kills}},
        }


async def _kill(http: httpx.AsyncClient, chance: random.Random, number: signal.Signals, streams: int) -> Kill:
    status = await until_ready(http, 0, RECOVERY_S)
    victim = chance.choice(status["ranks"])
    began = time.monotonic()
    os.kill(victim["pid"], number)
    after = await until_ready(http, status["epoch"] + 1, RECOVERY_S)
    seconds = time.monotonic() - began
    again = after["replayed_tokens"] - status["replayed_tokens"]
    return Kill(victim["rank"], victim["phase"], number.name, streams, round(seconds, 2), again)


async def _measure(url: str, streams: Sequence[Stream], given: argparse.Namespace) -> Answers:
    chance, answers = random.Random(given.seed), Answers()
    async with httpx.AsyncClient(base_url=url, timeout=SILENCE_S, limits=httpx.Limits(max_connections=100)) as http:
        began = time.monotonic()
        wanted = dict(zip(streams, await asyncio.gather(*(s.digest(http) for s in streams)), strict=True))
        undisturbed = time.monotonic() - began
        print(f"undisturbed: {len(streams)} answers in {undisturbed:.1f} s", file=sys.stderr, flush=True)
        over = asyncio.Event()

        async def ask(stream: Stream) -> None:
            while True:
                try:
                    same = await stream.digest(http) == wanted[stream]
                except (RuntimeError, httpx.HTTPError) as error:
                    answers.errors.append(f"{stream.name}: {error!r}")
                else:
                    answers.equal += same
                    answers.different += [] if same else [stream.name]
                if over.is_set():
                    return

        asking = [asyncio.create_task(ask(stream)) for stream in streams]
        for number in range(given.kills):
            await asyncio.sleep(chance.uniform(*given.between))
            stopped = given.stop_every and number % given.stop_every == given.stop_every - 1
            made = await _kill(http, chance, signal.SIGSTOP if stopped else signal.SIGKILL, len(streams))
            answers.kills.append(made)
            print(f"kill {number + 1} of {given.kills}: {asdict(made)}", file=sys.stderr, flush=True)
        over.set()
        await asyncio.gather(*asking)
    return answers


def main(arguments: Sequence[str]) -> int:
    """The exit code: 0 when every answer was the undisturbed one, else 1; 2 for input that is missing."""
    parser = parser_of("service-kills", __doc__, ranks=4)
    parser.add_argument("book", type=Path)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--bytes", type=int, default=400_000, help="of the book, shared by the streams")
    parser.add_argument("--max-tokens", type=int, default=400)
    parser.add_argument("--between", type=float, nargs=2, default=(0.5, 4.0), help="seconds of peace before each kill")
    parser.add_argument("--stop-every", type=int, default=10, help="every so manyth time SIGSTOP; 0: never")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    try:
        book = given.book.read_bytes()[: given.bytes].decode(errors="ignore")
    except OSError as error:
        print(f"service_kills: {given.book} cannot be read: {error.strerror}", file=sys.stderr)
        return 2
    with own_service(given.model, given.ranks) as service:
        streams = streams_of(book, given.streams, given.max_tokens)
        answers = asyncio.run(_measure(service.url, streams, given))
    result = json.dumps(answers.as_json(), indent=1)
    print(result)
    given.json.write_text(json.dumps({**answers.as_json(), "each": [asdict(kill) for kill in answers.kills]}))
    return int(bool(answers.different or answers.errors))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
