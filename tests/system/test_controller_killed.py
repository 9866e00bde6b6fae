"""The controller of a running service is killed while streams are open: they go on with the next one."""

import asyncio

import httpx

from tests.support.served import served
from tests.support.streams import Stream
from tests.support.waiting import eventually

STREAMS = (
    Stream("text", "It was a dark and stormy night; the rain fell in torrents. " * 4_000),
    Stream("drawn", "It was a dark and stormy night; " * 40, max_tokens=1_500),
    Stream("short", "Once ", max_tokens=1_500),
)


def test_streams_have_the_same_bits_when_the_controller_is_killed(tmp_path):
    """Rows and drawn text are those of a run in peace, over the same connections, without an error."""
    with served(tmp_path) as whole:

        async def ask(kill: bool) -> list[str]:
            moved = [asyncio.Event() for _ in STREAMS]
            async with httpx.AsyncClient(base_url=whole.url, timeout=180) as http:
                asking = [
                    asyncio.create_task(stream.digest(http, event.set))
                    for stream, event in zip(STREAMS, moved, strict=True)
                ]
                if kill:
                    await asyncio.gather(*(event.wait() for event in moved))
                    whole.parts()["controller"].kill()
                    assert not any(task.done() for task in asking)
                return await asyncio.gather(*asking)

        before = whole.parts()["controller"].pid
        wanted = asyncio.run(ask(kill=False))
        assert asyncio.run(ask(kill=True)) == wanted
        assert whole.parts()["controller"].pid != before
        eventually(lambda: bool(whole.status()), "the engine to be ready")
