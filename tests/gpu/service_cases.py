"""A service whose ranks are on the GPU: the rows of a book, text that is drawn, and a rank that is killed meanwhile."""

import asyncio
import os
import signal
import tempfile
import time
from functools import partial
from pathlib import Path

import httpx
import torch

from benchmarks.gpu.cases import DEVICE, Cases, Row
from tests.gpu.model_cases import MODEL, SHARED, compared, dist_attn, write_book
from tests.support.streams import Stream, streams_of
from tests.support.whole_service import ServiceProcess, until_ready

__all__ = ["killed_cases", "served_cases"]

START_S, SILENCE_S = 180.0, 180.0  # on a busy machine too: the piece has its own deadline


def served_cases(*, tiny: bool) -> Cases:
    """A book sent to a service, and drawing."""
    return {"a served book": partial(_served, 3_000 if tiny else 200_000)}


def _served(size: int) -> Row:
    """Rows against those of one process on the CPU, and whether the same seed draws the same text."""
    with (
        tempfile.TemporaryDirectory() as name,
        ServiceProcess(Path(name), ranks=1, model=MODEL, flags=_flags(DEVICE)) as service,
    ):
        folder = Path(name)
        book, want, got = write_book(folder, size), folder / "want.npy", folder / "got.npy"
        dist_attn("encode", str(book), f"--model={MODEL}", f"--out={want}", "--device=cpu")
        service.wait_until_ready(START_S)
        began = time.perf_counter()
        dist_attn("encode", str(book), f"--out={got}", f"--url={service.url}")
        row = {"encode_s": time.perf_counter() - began, **compared(want, got, torch.float32)}
        drawn = Stream("drawn", book.read_text()[:500], 20 if size < 10_000 else 200)
        first, again = (asyncio.run(_answers(service.url, [drawn])) for _ in range(2))
        return {**row, "right": row["right"] and first == again, "same text": first == again}


def killed_cases(*, tiny: bool) -> Cases:
    """Two ranks on the one GPU, of which one is killed."""
    return {"a killed rank": partial(_killed, 6_000 if tiny else 2_000_000)}


def _killed(size: int) -> Row:
    """Whether answers are the undisturbed ones where SIGKILL ends a rank in their midst; seconds until it was ready."""
    with (
        tempfile.TemporaryDirectory() as name,
        ServiceProcess(Path(name), ranks=2, model=MODEL, flags=_flags(SHARED)) as service,
    ):
        service.wait_until_ready(START_S)
        streams = streams_of(write_book(Path(name), size).read_text(), 2, 100)
        return asyncio.run(_disturbed(service.url, streams))


async def _disturbed(url: str, streams: list[Stream]) -> Row:
    wanted = await _answers(url, streams)
    async with httpx.AsyncClient(base_url=url, timeout=SILENCE_S) as http:
        rows, came = 0, asyncio.Event()

        def count() -> None:
            nonlocal rows
            rows += 1
            if rows >= 3:
                came.set()

        asked = [asyncio.create_task(stream.digest(http, count)) for stream in streams]
        await asyncio.wait([asyncio.create_task(came.wait()), *asked], return_when=asyncio.FIRST_COMPLETED)
        status, open_streams = await until_ready(http, 0, START_S), sum(not one.done() for one in asked)
        began = time.monotonic()
        os.kill(status["ranks"][-1]["pid"], signal.SIGKILL)
        after = await until_ready(http, status["epoch"] + 1, START_S)
        ready_s = time.monotonic() - began
        same = list(await asyncio.gather(*asked)) == wanted
        replayed = after["replayed_tokens"] - status["replayed_tokens"]
    return {"right": same, "open streams": open_streams, "ready_s": ready_s, "replayed tokens": replayed}


def _flags(device: str) -> tuple[str, ...]:
    return f"--device={device}", "--dtype=float32"


async def _answers(url: str, streams: list[Stream]) -> list[str]:
    async with httpx.AsyncClient(base_url=url, timeout=SILENCE_S) as http:
        return list(await asyncio.gather(*(stream.digest(http) for stream in streams)))
