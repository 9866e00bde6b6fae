"""A long document through the API alone: its memory, and how soon `/livez` answers, also when the client never reads.

`dist-attn bench service-streaming --megabytes 1024` puts an engine that answers at once behind an API process of
its own; the tokeniser, the spools and the rows are real.
"""

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import quantiles

import httpx

from benchmarks.setting import Setting, look_around
from dist_attn.shipped import resolve_model_folder
from dist_attn_papers.service.instant_engine import InstantEngine
from dist_attn_papers.service.livez import asking_livez
from dist_attn_papers.service.program import instant_service, parser_of, sizes_of
from tests.support.whole_service import ServiceProcess

__all__ = ["Streaming", "Watched", "main", "measure"]

MEBIBYTE, PIECE = 1 << 20, 1 << 16
LINE = b"It was the best of times, it was the worst of times, it was the age of wisdom, said he to her.\n"
MOST_GROWTH, MOST_WAIT_MS = 64_000_000, 100.0
WARM_MEGABYTES, SAMPLE_S, END_S = 4, 0.05, 600.0


@dataclass(frozen=True)
class Watched:
    """One document. Units: seconds, bytes, milliseconds; `grew_bytes` is above what it was after a short document."""

    client: str
    seconds: float
    tokens: int
    before_bytes: int
    grew_bytes: int
    livez_p50_ms: float
    livez_p99_ms: float
    livez_max_ms: float


@dataclass(frozen=True)
class Streaming:
    """Both clients, measured."""

    setting: Setting
    megabytes: int
    rows: tuple[Watched, ...]

    def as_json(self) -> str:
        """The result for machines."""
        return json.dumps({"object": "benchmark", "case": "service-streaming", **asdict(self)}, indent=2) + "\n"

    def as_markdown(self) -> str:
        """The result for people."""
        lines = [
            "# service-streaming",
            "",
            f"{self.megabytes:,} MiB through /v1/encodings, rows of 512 tokens as NDJSON, behind it an engine that "
            "answers at once. Promised for 1 GB: memory grows by less than 64 MB, /livez p99 below 100 ms.",
            "",
            self.setting.sentence(),
            "",
            "| client | MiB/s | tokens/s | memory before | grew by | /livez p50 | p99 | max |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for row in self.rows:
            speeds = (self.megabytes / row.seconds, row.tokens / row.seconds)
            memory = (row.before_bytes / 1e6, row.grew_bytes / 1e6)
            waits = (row.livez_p50_ms, row.livez_p99_ms, row.livez_max_ms)
            cells = [row.client, f"{speeds[0]:.1f}", f"{speeds[1]:,.0f}", *(f"{size:.1f} MB" for size in memory)]
            lines.append(f"| {' | '.join([*cells, *(f'{wait:.1f} ms' for wait in waits)])} |")
        return "\n".join(lines) + "\n"


async def _document(size: int) -> AsyncIterator[bytes]:
    text = LINE * (PIECE // len(LINE) + 1)
    for at in range(0, size, PIECE):
        yield text[: min(PIECE, size - at)]


async def _read_all(url: str, size: int) -> None:
    """Send the document and take its rows.

    Raises: RuntimeError for an answer that does not end with its summary.
    """
    headers, last = {"content-type": "application/octet-stream"}, b""
    async with (
        httpx.AsyncClient(base_url=url, timeout=END_S) as http,
        http.stream("POST", "/v1/encodings", content=_document(size), headers=headers) as answer,
    ):
        answer.raise_for_status()
        async for part in answer.aiter_raw():
            last = (last + part)[-4096:]
    if b'"encoding.summary"' not in last:
        raise RuntimeError(f"the answer ended with {last[-300:]!r}")


async def _never_read(url: str, size: int, engine: InstantEngine) -> None:
    """Send the document and take nothing; leave when the engine has read it.

    Raises: TimeoutError.
    """
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1)
    head = f"POST /v1/encodings HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/octet-stream\r\n"
    writer.write(f"{head}Content-Length: {size}\r\n\r\n".encode())
    reader._transport.pause_reading()  # type: ignore[attr-defined]  # what comes stays in the socket
    done = engine.done + engine.cancelled
    async for piece in _document(size):
        writer.write(piece)
        await writer.drain()
    async with asyncio.timeout(END_S):
        while True:
            await asyncio.sleep(SAMPLE_S)
            if engine.done + engine.cancelled > done:
                break
    writer.transport.abort()


async def _peak(pid: int, over: asyncio.Event) -> int:
    """The largest memory of the process while it lasts; bytes."""
    most = 0
    while not over.is_set():
        most = max(most, _resident(pid))
        await asyncio.sleep(SAMPLE_S)
    return most


def _resident(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))


async def _watched(client: str, url: str, pid: int, size: int, engine: InstantEngine) -> Watched:
    """One document of this size, while memory and /livez are watched."""
    before, tokens = _resident(pid), engine.tokens
    over = asyncio.Event()
    peak = asyncio.create_task(_peak(pid, over))
    with asking_livez(url) as waits:
        began = time.perf_counter()
        await (_read_all(url, size) if client == "reads" else _never_read(url, size, engine))
        seconds = time.perf_counter() - began
    over.set()
    percentiles = quantiles(waits, n=100, method="inclusive")
    return Watched(
        client=client,
        seconds=seconds,
        tokens=engine.tokens - tokens,
        before_bytes=before,
        grew_bytes=await peak - before,
        livez_p50_ms=percentiles[49],
        livez_p99_ms=percentiles[98],
        livez_max_ms=max(waits),
    )


async def _observe(service: ServiceProcess, engine: InstantEngine, megabytes: int) -> tuple[Watched, ...]:
    # What every process takes once, such as the tokeniser's tables, is no growth.
    await _read_all(service.url, min(WARM_MEGABYTES, megabytes) * MEBIBYTE)
    size = megabytes * MEBIBYTE
    return tuple(
        [await _watched(client, service.url, service.pid, size, engine) for client in ("reads", "never reads")]
    )


def measure(megabytes: int, model: str = "books-6m") -> Streaming:
    """Both clients, one after the other, against one API process."""
    setting, folder = look_around(), resolve_model_folder(model)
    engine = InstantEngine(*sizes_of(folder))
    with instant_service(folder, engine) as service:
        rows = asyncio.run(_observe(service, engine, megabytes))
    return Streaming(setting, megabytes, rows)


def main(arguments: Sequence[str]) -> int:
    """The exit code: 0 when memory and /livez are as promised, else 1."""
    parser = parser_of("service-streaming", __doc__)
    parser.add_argument("--megabytes", type=int, default=1024, help="of the document; 2^20 bytes each")
    given = parser.parse_args(arguments)
    found = measure(given.megabytes, given.model)
    print(found.as_markdown())
    given.json.write_text(found.as_json())
    return int(any(row.grew_bytes > MOST_GROWTH or row.livez_p99_ms > MOST_WAIT_MS for row in found.rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
