"""What a client sends costs time in proportion to its length, whatever it is made of."""

import asyncio
import gzip

import pytest
from dist_attn_service.http.exchange import RequestBody

from tests.fuzz.growth import READERS, TEXTS, WORST, growth


@pytest.mark.slow
@pytest.mark.parametrize("reader", READERS)
def test_time_is_linear_in_the_text(reader: str) -> None:
    """Twice as many bytes take at most two and a half times as much CPU time, of texts made to be slow."""
    found = {text: growth(READERS[reader], unit, 1 << 15)[0] for text, unit in TEXTS.items()}
    assert {text: ratio for text, ratio in found.items() if ratio > WORST} == {}


def test_each_member_of_a_body_in_gzip_lets_others_run() -> None:
    """Also of members that hold nothing or one byte, thousands of which may arrive at once."""
    members = [gzip.compress(b""), gzip.compress(b"a")] * 500
    turns = 0

    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": b"".join(members), "more_body": False}

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def read() -> bytes:
        busy = asyncio.create_task(others())
        body = RequestBody(receive, idle_seconds=60, gzip=True)
        data = b"".join([piece async for piece in body.chunks()])
        busy.cancel()
        return data

    assert asyncio.run(read()) == b"a" * 500
    assert turns >= len(members)
