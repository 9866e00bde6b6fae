"""Clients leave at random moments, in every phase of a request: how soon the engine stops working for them.

`dist-attn bench service-disconnects --ranks 1` starts a service of its own. Promised (G7 in `promised.py`) is that at
most 4 steps of reading or 512 drawn tokens, and 1 s, follow: steps under way are finished, so steps are what counts.
The status is a fraction of a second old, so the seconds may be too long by that.
"""

import asyncio
import json
import random
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass

import httpx

from dist_attn_papers.service.program import own_service, parser_of

__all__ = ["PHASES", "Left", "main", "observe"]

TEXT = "It was the best of times, it was the worst of times, said he. "
STOP_S, POLL_S = 60.0, 0.005
PHASES = ("upload", "reading a text", "reading a prompt", "drawing", "drawing, not streamed", "waiting")


@dataclass(frozen=True)
class Left:
    """A client that left. Units: seconds and steps until no request was open any more."""

    phase: str
    seconds: float
    steps: int


async def _upload(http: httpx.AsyncClient) -> None:
    async def slowly() -> AsyncIterator[bytes]:
        while True:
            yield TEXT.encode() * 200
            await asyncio.sleep(0.05)

    headers = {"content-type": "text/plain"}
    async with http.stream("POST", "/v1/encodings", content=slowly(), headers=headers) as answer:
        async for _ in answer.aiter_raw():
            pass


async def _read(http: httpx.AsyncClient) -> None:
    headers = {"content-type": "text/plain"}
    async with http.stream("POST", "/v1/encodings", content=TEXT.encode() * 20_000, headers=headers) as answer:
        async for _ in answer.aiter_raw():
            pass


async def _complete(http: httpx.AsyncClient, prompts: int, *, stream: bool) -> None:
    body = {"prompt": TEXT * prompts, "max_tokens": 5000, "stream": stream}
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        async for _ in answer.aiter_raw():
            pass


async def _ask(http: httpx.AsyncClient, phase: str) -> None:
    match phase:
        case "upload":
            await _upload(http)
        case "reading a text":
            await _read(http)
        case "reading a prompt":
            await _complete(http, 20_000, stream=True)
        case "waiting":  # behind many others, more than hold a place at once
            await asyncio.gather(*(_complete(http, 50, stream=True) for _ in range(40)))
        case _:
            await _complete(http, 1, stream=phase == "drawing")


async def _status(http: httpx.AsyncClient) -> tuple[int, int]:
    status = (await http.get("/v1/status")).json()
    return (status["queued"] or 0) + (status["sessions"] or 0), status["step"] or 0


async def _leave(url: str, phase: str, after_s: float) -> Left:
    async with httpx.AsyncClient(base_url=url, timeout=STOP_S) as watching:
        # The status is that of the last look at the controller: wait until it shows the work.
        client = httpx.AsyncClient(base_url=url, timeout=STOP_S, limits=httpx.Limits(max_connections=64))
        asking = asyncio.create_task(_ask(client, phase))
        async with asyncio.timeout(STOP_S):
            while True:
                if (await _status(watching))[0] or asking.done():
                    break
                await asyncio.sleep(POLL_S)
        await asyncio.sleep(after_s)
        _, before = await _status(watching)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await client.aclose()
        began = time.perf_counter()
        async with asyncio.timeout(STOP_S):
            while True:
                left, step = await _status(watching)
                if not left:
                    return Left(phase, round(time.perf_counter() - began, 3), step - before)
                await asyncio.sleep(POLL_S)


async def observe(url: str, times: int, seed: int = 0, longest_s: float = 1.0) -> list[Left]:
    """Leave in every phase so many times, each at a random moment of its first seconds.

    Raises: TimeoutError where work goes on for a minute without anybody who waits for it.
    """
    chance = random.Random(seed)
    return [await _leave(url, phase, chance.uniform(0, longest_s)) for _ in range(times) for phase in PHASES]


def main(arguments: Sequence[str]) -> int:
    """Print how long work went on, per phase; the exit code is 0 when it always ended."""
    parser = parser_of("service-disconnects", __doc__, ranks=1)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    with own_service(given.model, given.ranks) as service:
        seen = asyncio.run(observe(service.url, given.times, given.seed))
    found = []
    for phase in PHASES:
        of_phase = [left for left in seen if left.phase == phase]
        found.append(
            {
                "phase": phase,
                "most_seconds": max(left.seconds for left in of_phase),
                "most_steps": max(left.steps for left in of_phase),
                "each": [asdict(left) for left in of_phase],
            }
        )
        print(json.dumps(found[-1]))
    given.json.write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
