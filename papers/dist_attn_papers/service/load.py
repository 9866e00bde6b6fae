"""Many clients at once against a service that runs: errors, fairness, and the throughput of all against that of one.

`dist-attn bench service-load http://127.0.0.1:8000 --clients 32 --seconds 60`
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles

import httpx

__all__ = ["Client", "Load", "main", "run_clients"]

PROMPT = "It was the best of times, it was the worst of times, "
SILENCE_SECONDS = 60.0


@dataclass
class Client:
    """What one client saw, in seconds and tokens."""

    tokens: int = 0
    request_seconds: list[float] = field(default_factory=list)
    first_token_seconds: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Load:
    """What all clients of one run saw together."""

    clients: int
    seconds: float
    requests: int
    errors: int
    tokens_per_second: float
    tokens_least: int
    tokens_most: int
    request_seconds_median: float
    request_seconds_p95: float
    request_seconds_max: float
    first_token_seconds_median: float
    first_token_seconds_max: float


async def complete(http: httpx.AsyncClient, number: int, max_tokens: int, client: Client) -> None:
    """One streamed completion; what goes wrong is written down, not raised."""
    body: dict[str, object] = {
        "prompt": PROMPT * (1 + number % 4),
        "max_tokens": max_tokens,
        "stream": True,
        "seed": number,
    }
    body["stream_options"] = {"include_usage": True}
    began, finished = time.perf_counter(), False
    try:
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            answer.raise_for_status()
            first = True
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    finished = True
                elif line.startswith("data: "):
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        client.errors.append(str(event["error"]))
                    elif event.get("usage"):
                        client.tokens += event["usage"]["completion_tokens"]
                    elif first:
                        client.first_token_seconds.append(time.perf_counter() - began)
                        first = False
    except httpx.HTTPError as error:
        client.errors.append(repr(error))
        return
    if not finished:
        client.errors.append("the stream ended without [DONE]")
    client.request_seconds.append(time.perf_counter() - began)


async def run_clients(url: str, clients: int, seconds: float, max_tokens: int) -> tuple[Load, list[Client]]:
    """`clients` at once, each one request after the other for `seconds`, one at least; what has begun is finished."""
    seen = [Client() for _ in range(clients)]
    limits = httpx.Limits(max_connections=clients)
    began = time.perf_counter()

    async with httpx.AsyncClient(base_url=url, timeout=SILENCE_SECONDS, limits=limits) as http:

        async def work(number: int) -> None:
            await complete(http, number, max_tokens, seen[number])
            while time.perf_counter() - began < seconds and len(seen[number].errors) < 3:
                await complete(http, number, max_tokens, seen[number])

        await asyncio.gather(*(work(number) for number in range(clients)))
    return summary(seen, time.perf_counter() - began), seen


def summary(seen: Sequence[Client], seconds: float) -> Load:
    """The clients' numbers together."""
    requests = sorted(t for client in seen for t in client.request_seconds) or [0.0]
    firsts = sorted(t for client in seen for t in client.first_token_seconds) or [0.0]
    tokens = [client.tokens for client in seen]
    return Load(
        clients=len(seen),
        seconds=round(seconds, 2),
        requests=sum(len(client.request_seconds) for client in seen),
        errors=sum(len(client.errors) for client in seen),
        tokens_per_second=round(sum(tokens) / seconds, 1),
        tokens_least=min(tokens),
        tokens_most=max(tokens),
        request_seconds_median=round(median(requests), 3),
        request_seconds_p95=round(quantiles(requests, n=20)[-1] if len(requests) > 1 else requests[0], 3),
        request_seconds_max=round(requests[-1], 3),
        first_token_seconds_median=round(median(firsts), 3),
        first_token_seconds_max=round(firsts[-1], 3),
    )


def main(arguments: Sequence[str]) -> int:
    """Print the load of one client, then of all, as JSON lines, and their ratio; 1 when a request failed."""
    parser = argparse.ArgumentParser(prog="dist-attn bench service-load", description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=60.0, help="of all clients; one alone gets a third of it")
    parser.add_argument("--max-tokens", type=int, default=64, help="drawn by each request")
    given = parser.parse_args(arguments)
    one, _ = asyncio.run(run_clients(given.url, 1, given.seconds / 3, given.max_tokens))
    print(json.dumps(vars(one)), flush=True)
    many, seen = asyncio.run(run_clients(given.url, given.clients, given.seconds, given.max_tokens))
    print(json.dumps(vars(many)), flush=True)
    ratio = many.tokens_per_second / max(one.tokens_per_second, 1e-9)
    spread = many.tokens_most / max(many.tokens_least, 1)
    print(json.dumps({"all_against_one": round(ratio, 2), "most_against_least": round(spread, 2)}), flush=True)
    for number, client in enumerate(seen):
        for error in client.errors:
            print(f"client {number}: {error}", file=sys.stderr)
    return int(one.errors + many.errors > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
