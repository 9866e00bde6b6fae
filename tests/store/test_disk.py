"""The store on disk: sound after a kill at any point and after a full disk, and shared by processes."""

import asyncio
import contextlib
import os
import random
import resource
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dist_attn.errors import ConfigError, StorageError
from dist_attn.store import StoreLimits, Usage, open_store
from dist_attn.store.disk import DiskRecords
from dist_attn.store.records import BufferedTransaction
from tests.support.stores import stream

KILLS = int(os.environ.get("DIST_ATTN_TEST_KILLS", "4"))
DEADLINE_S = 60.0
BUSY = """
import asyncio, random, sys
from dist_attn.errors import DistAttnError
from dist_attn.store import StoreLimits, open_store
from tests.support.stores import stream

async def busy(folder, seed):
    rng = random.Random(seed)
    store = await open_store(folder, StoreLimits(hold_s=0.01, orphan_s=20.0, session_checkpoints=3))
    print("ready", flush=True)
    session = await store.sessions.create("ann")
    for step in range(1, 100_000):
        _, token = await store.sessions.begin_append("ann", session.id, f"key {step}", expected_position=step - 1)
        info = await store.snapshots.put("ann", stream(rng.randbytes(200_000), (70_000,)))
        await store.sessions.advance("ann", session.id, token, step, info.id, done=True)
        print("kept", session.id, step, info.digest, flush=True)
        fork = await store.sessions.fork("ann", session.id)
        if step % 3 == 0:
            await store.sessions.delete("ann", fork.id)
        await store.upkeep.collect()

asyncio.run(busy(sys.argv[1], int(sys.argv[2])))
"""


def start(folder, seed):
    """A process that writes without end."""
    command = [sys.executable, "-c", BUSY, str(folder), str(seed)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True)


def killed_after(process, seconds):
    """Kill a process so long after it was ready; the lines that it printed."""
    assert process.stdout.readline() == "ready\n"
    time.sleep(seconds)
    process.send_signal(signal.SIGKILL)
    out, _ = process.communicate(timeout=DEADLINE_S)
    return [line.split() for line in out.splitlines() if line.count(" ") == 3]


def test_a_kill_at_any_point_loses_nothing_that_was_kept(tmp_path):
    """After kill -9 of a writer again and again, all that it said was kept is there, and the books and bytes agree."""
    rng = random.Random(0)

    async def look(lines):
        limits = StoreLimits(hold_s=0.01, orphan_s=0.0)
        async with await open_store(str(tmp_path), limits) as store:  # which repairs it
            assert await store.upkeep.audit() == []
            _, session, position, digest = lines[-1]
            known = await store.sessions.get("ann", session)
            assert known.position >= int(position)
            at = {point.position: point.snapshot for point in known.checkpoints}
            assert (await store.snapshots.stat("ann", at[int(position)])).digest == digest
            assert len([piece async for piece in store.snapshots.get("ann", known.checkpoints[-1].snapshot)]) >= 1
            await store.upkeep.collect()
            blobs = [name async for name in store._place.blobs.names()]
            assert len(blobs) == (await store.snapshots.usage("ann")).snapshots
            return len(lines)

    steps = 0
    for kill in range(KILLS):
        lines = killed_after(start(tmp_path, kill), 0.05 + 0.25 * rng.random())
        if lines:
            steps += asyncio.run(look(lines))
    assert steps >= KILLS


@contextlib.contextmanager
def full(limit):
    """No file can become larger than this: writing fails in the system, half-way, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_leaves_the_store_sound(tmp_path):
    """Bytes and records that do not fit are a StorageError, and what was kept before stays and goes on."""

    async def work():
        async with await open_store(str(tmp_path)) as store:
            session = await store.sessions.create("ann")
            info = await store.snapshots.put("ann", stream(b"first" * 100))
            _, token = await store.sessions.begin_append("ann", session.id, "key")
            with (
                full(150_000),
                pytest.raises(StorageError, match="snapshot could not be written: File too large; make"),
            ):
                await store.snapshots.put("ann", stream(bytes(1 << 20)))
            failed = 0
            with full(150_000):
                for _ in range(200):  # until the catalogue's log does not fit any more
                    try:
                        await store.sessions.create("ann")
                    except StorageError as error:
                        failed += 1
                        assert "catalogue" in str(error) and "make room" in str(error)
            assert failed
            assert await store.upkeep.audit() == []
            await store.sessions.advance("ann", session.id, token, 5, info.id, done=True)
            await store.snapshots.put("ann", stream(bytes(1 << 20)))
        async with await open_store(str(tmp_path)) as store:
            assert await store.upkeep.audit() == []
            names = [name async for name in store._place.blobs.names()]
            return (await store.sessions.get("ann", session.id)).position, len(names)

    assert asyncio.run(work()) == (5, 2)


def test_processes_share_a_folder(tmp_path):
    """Two processes that write to one folder wait for each other, and the books agree while both go on."""
    processes = [start(tmp_path, seed) for seed in range(2)]

    async def work():
        async with await open_store(str(tmp_path), StoreLimits(hold_s=0.01, orphan_s=20.0)) as store:
            for _ in range(3):
                await asyncio.sleep(0.1)
                session = await store.sessions.create("bob")
                await store.sessions.delete("bob", session.id)
            return await store.snapshots.usage("bob")

    try:
        for process in processes:
            assert process.stdout.readline() == "ready\n"
        assert asyncio.run(work()) == Usage()
        assert [process.poll() for process in processes] == [None, None]
    finally:
        for process in processes:
            process.kill()
            process.communicate(timeout=DEADLINE_S)

    async def audit():
        async with await open_store(str(tmp_path)) as store:
            return await store.upkeep.audit()

    assert asyncio.run(audit()) == []


def test_what_is_no_store_is_refused(tmp_path):
    """A catalogue that is another file, and a folder that cannot be one, are said with what to do."""
    (tmp_path / "catalogue.sqlite").write_bytes(b"not a database, but long enough to be looked at" * 20)
    (tmp_path / "file").write_text("")
    for address in (tmp_path, tmp_path / "file" / "folder"):
        with pytest.raises(StorageError, match="cannot be opened"):
            asyncio.run(open_store(str(address)))
    for address in ("", "http://example.com"):
        with pytest.raises(ConfigError, match="needed is a folder"):
            asyncio.run(open_store(address))


def test_the_catalogue_is_durable_and_can_be_looked_at(tmp_path):
    """The catalogue is written ahead with full syncs, its values are JSON, and no caller's name stands in it."""

    async def work():
        async with await open_store(str(tmp_path)) as store:
            await store.sessions.create("ann@example.com")
            connection = store._place.records._connection
            modes = [await connection.execute_fetchall(f"PRAGMA {name}") for name in ("journal_mode", "synchronous")]
            return [next(iter(rows))[0] for rows in modes]

    assert asyncio.run(work()) == ["wal", 2]
    with contextlib.closing(sqlite3.connect(tmp_path / "catalogue.sqlite")) as catalogue:
        rows = dict(catalogue.execute("SELECT key, json(value) FROM records WHERE key LIKE 'session/%'").fetchall())
    assert len(rows) == 1
    assert not any(b"example.com" in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


def test_a_cancelled_change_is_not_half_made(tmp_path):
    """A transaction that is cancelled in the middle changes nothing, and the next one goes through."""

    async def work():
        records = await DiskRecords.open(tmp_path / "records.sqlite")

        async def slow(transaction):
            transaction.put("a", b"1")
            await asyncio.sleep(3600)

        async def look(transaction):
            return await transaction.get("a"), await transaction.scan("", 9)

        task = asyncio.create_task(records.transact(slow))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        found = await records.transact(look)
        await records.close()
        return found

    assert asyncio.run(work()) == (None, [])


def test_files_lie_below_the_folder(tmp_path):
    """Blobs have names of the store's own making, and nothing is written outside its folder."""

    async def work():
        async with await open_store(str(tmp_path / "inner")) as store:
            for tenant in ("../../escape", "/etc", "a\0b"):
                await store.snapshots.put(tenant, stream(b"data"))

    asyncio.run(work())
    files = [Path(folder) / name for folder, _, names in os.walk(tmp_path) for name in names]
    assert len(files) >= 4
    assert all(path.is_relative_to(tmp_path / "inner") for path in files)


def test_who_is_cancelled_leaves_no_transaction_open(tmp_path: Path) -> None:
    """Wherever a change is cut off, the next one of the same process goes through, and only whole changes are there."""

    async def put(transaction: BufferedTransaction) -> None:
        transaction.put("one", b"1")
        transaction.put("two", b"2")

    async def cut(steps: int) -> list[bytes | None]:
        records = await DiskRecords.open(tmp_path / f"{steps}.sqlite")
        try:
            task = asyncio.create_task(records.transact(put))
            for _ in range(steps):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return await records.transact(lambda transaction: transaction.get_many(["one", "two"]))
        finally:
            await records.close()

    for steps in range(6):
        assert asyncio.run(cut(steps)) in ([None, None], [b"1", b"2"])
