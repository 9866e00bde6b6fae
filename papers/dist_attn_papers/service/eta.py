"""How near are the times that a service estimates? Documents are estimated, then sent, and both are compared.

`dist-attn bench service-eta BOOK --tokens 120000 200000` starts a service of its own, lets it read a first
document, by which it measures its speed, and estimates each of the others before it is sent: alone, then beside one.
"""

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from dist_attn_papers.service.program import own_service, parser_of

__all__ = ["Compared", "compare", "main", "read"]

SILENCE_S = 600.0
GOAL = 0.15


@dataclass(frozen=True)
class Compared:
    """One document: what was estimated when it was sent, and what it took. Units: seconds; ratio = estimate / truth."""

    tokens: int
    estimated_tokens: float
    beside: int
    estimated_seconds: float
    low: float
    high: float
    seconds: float
    source: str

    @property
    def ratio(self) -> float:
        """1 when the estimate was right."""
        return self.estimated_seconds / self.seconds

    def as_json(self) -> dict[str, Any]:
        """For the files of results."""
        return {**asdict(self), "ratio": round(self.ratio, 4), "within_goal": abs(self.ratio - 1) <= GOAL}


async def read(http: httpx.AsyncClient, text: bytes) -> tuple[int, float]:
    """Encode a document: its tokens, and how long that took.

    Raises: RuntimeError when the answer is an error.
    """
    began, last = time.perf_counter(), ""
    headers = {"content-type": "text/plain"}
    async with http.stream("POST", "/v1/encodings", content=text, headers=headers) as answer:
        async for line in answer.aiter_lines():
            last = line
    found = json.loads(last)
    if found.get("object") != "encoding.summary":
        raise RuntimeError(f"an encoding failed: {last[:400]}")
    return found["tokens"], time.perf_counter() - began


async def compare(http: httpx.AsyncClient, text: bytes, beside: int = 0) -> Compared:
    """Estimate a document by its size and a sample, send it, and compare; `beside` is how many are under way."""
    sample = text[: 1 << 16].decode(errors="ignore")
    asked = {"bytes": len(text), "input": sample}
    answer = await http.post("/v1/estimate", json=asked)
    answer.raise_for_status()
    told = answer.json()
    tokens, seconds = await read(http, text)
    total = told["total_seconds"]
    source = told["seconds"]["source"]
    return Compared(
        tokens, told["tokens"]["value"], beside, total["value"], total["low"], total["high"], round(seconds, 3), source
    )


async def measure(url: str, book: bytes, tokens: Sequence[int]) -> list[Compared]:
    """The first document only teaches the service; each of the others is compared, then the last beside another."""
    async with httpx.AsyncClient(base_url=url, timeout=SILENCE_S) as http:
        first, _ = await read(http, book[: 1 << 18])
        bytes_per_token = (1 << 18) / first
        found = []
        for count in tokens:
            size = int(count * bytes_per_token)
            if size > len(book):
                raise RuntimeError(f"{count} tokens need about {size} bytes; the book has {len(book)}")
            found.append(await compare(http, book[-size:]))
            print(json.dumps(found[-1].as_json()), file=sys.stderr, flush=True)
        other = asyncio.create_task(read(http, book[: int(2 * tokens[-1] * bytes_per_token)]))
        await asyncio.sleep(0.5)
        found.append(await compare(http, book[-int(tokens[-1] * bytes_per_token) :], beside=1))
        await other
    return found


def main(arguments: Sequence[str]) -> int:
    """The exit code: 0 when every estimate is within the goal, else 1; 2 for input that is missing."""
    parser = parser_of("service-eta", __doc__, ranks=1)
    parser.add_argument("book", type=Path)
    parser.add_argument("--tokens", type=int, nargs="+", default=(120_000, 200_000))
    given = parser.parse_args(arguments)
    try:
        book = given.book.read_bytes()
    except OSError as error:
        print(f"service_eta: {given.book} cannot be read: {error.strerror}", file=sys.stderr)
        return 2
    with own_service(given.model, given.ranks) as service:
        found = asyncio.run(measure(service.url, book, given.tokens))
    result = [one.as_json() for one in found]
    print(json.dumps(result, indent=1))
    given.json.write_text(json.dumps(result))
    return int(any(not one["within_goal"] for one in result))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
