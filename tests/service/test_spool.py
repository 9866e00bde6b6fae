"""The spool between two tasks: order, bounds, disk given back."""

import asyncio
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from dist_attn_service.base.errors import BadRequest, ServiceError
from dist_attn_service.text.spool import BLOCK_BYTES, DiskBudget, SpoolFactory


@pytest.fixture
def spools(tmp_path: Path) -> Iterator[SpoolFactory]:
    """Spools of 64 KiB memory and 8 MiB disk."""
    with ThreadPoolExecutor(1) as disk:
        yield SpoolFactory(tmp_path, memory=64 << 10, budget=DiskBudget(8 << 20), disk=disk)


def test_bytes_come_out_as_they_went_in(spools: SpoolFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the sizes of puts and reads, and wherever memory ends and files begin, the order is kept."""
    monkeypatch.setattr("dist_attn_service.text.spool.SEGMENT_BYTES", 512 << 10)
    draw = random.Random(7)
    chunks = [draw.randbytes(draw.choice((1, 100, 5_000, 70_000, 300_000))) for _ in range(60)]

    async def exchange() -> bytes:
        got = []
        with spools.open("test", 8 << 20) as spool:

            async def put() -> None:
                for chunk in chunks:
                    await spool.put(chunk)
                    if draw.random() < 0.3:
                        await asyncio.sleep(0)
                spool.end(b"last")

            async with asyncio.TaskGroup() as group:
                group.create_task(put())
                while block := await spool.read(draw.choice((1_000, 50_000, 400_000))):
                    got.append(block)
            assert spool.spilled
        return b"".join(got)

    assert asyncio.run(asyncio.wait_for(exchange(), 60)) == b"".join(chunks) + b"last"
    assert spools.budget.used == 0


def test_memory_is_bounded_and_disk_is_given_back(spools: SpoolFactory, tmp_path: Path) -> None:
    """Unread bytes go to anonymous files: nothing to clean up after a kill, nothing left after a close."""

    async def fill() -> None:
        with spools.open("test", 8 << 20) as spool:
            for _ in range(40):
                await spool.put(bytes(100_000))
                held = len(spool._head) + len(spool._tail)
                assert held <= (64 << 10) + BLOCK_BYTES
            assert spools.budget.used == spool.spilled > 3_000_000
            assert list(tmp_path.iterdir()) == []
        assert spools.budget.used == 0

    asyncio.run(asyncio.wait_for(fill(), 60))


def test_a_full_spool_says_so(spools: SpoolFactory) -> None:
    """Over its own limit or the limit of all together, put refuses with 507 and keeps what it had."""

    async def overfill(limit: int) -> None:
        with spools.open("rows", limit) as spool:
            with pytest.raises(ServiceError) as refused:
                for _ in range(200):
                    await spool.put(bytes(100_000))
            assert refused.value.status == 507
            assert "bytes" in refused.value.message

    asyncio.run(asyncio.wait_for(overfill(1 << 20), 60))
    asyncio.run(asyncio.wait_for(overfill(1 << 30), 60))
    assert spools.budget.used == 0


def test_a_failure_reaches_the_reader_first(spools: SpoolFactory) -> None:
    """After fail, a read raises the error although bytes are waiting, and puts are dropped."""

    async def fail() -> None:
        with spools.open("input", 1 << 20) as spool:
            await spool.put(b"good")
            spool.fail(BadRequest("bad"))
            await spool.put(bytes(2 << 20))
            with pytest.raises(BadRequest, match="bad"):
                await spool.read(10)

    asyncio.run(asyncio.wait_for(fail(), 60))


def test_closing_during_a_write_is_safe(spools: SpoolFactory) -> None:
    """A request that dies while its bytes are on the way to the disk leaves no file and no bytes behind."""

    async def cancel() -> None:
        with spools.open("input", 8 << 20) as spool:
            put = asyncio.create_task(spool.put(bytes(3 << 20)))
            await asyncio.sleep(0)
            put.cancel()
            await asyncio.gather(put, return_exceptions=True)
        assert spools.budget.used == 0

    asyncio.run(asyncio.wait_for(cancel(), 60))
