"""The store on disk: sound after a kill at any point and after a full disk, and shared by processes."""

import asyncio
import contextlib
import os
import random
import resource
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
import time
import zlib
from pathlib import Path
from typing import Any

import pytest

from dist_attn.errors import ConfigError, StorageError
from dist_attn.store import Reached, StoreLimits, Usage, disk, open_store
from dist_attn.store.disk import DiskBlobs, DiskRecords
from dist_attn.store.files import BlobFile, BlobFolder
from dist_attn.store.ports import BufferedTransaction
from dist_attn.store.private import private_opener, tighten
from tests.support.stores import stream

KILLS = int(os.environ.get("DIST_ATTN_TEST_KILLS", "4"))
DEADLINE_S = 60.0
BUSY = """
import asyncio, random, sys
from dist_attn.errors import DistAttnError
from dist_attn.store import Reached, StoreLimits, open_store
from tests.support.stores import stream

async def busy(folder, seed):
    rng = random.Random(seed)
    store = await open_store(folder, StoreLimits(hold_s=0.01, orphan_s=20.0, session_checkpoints=3))
    print("ready", flush=True)
    session = await store.sessions.create("ann")
    for step in range(1, 100_000):
        _, token = await store.sessions.begin_append("ann", session.id, f"key {step}", expected_position=step - 1)
        info = await store.snapshots.put("ann", stream(rng.randbytes(200_000), (70_000,)))
        await store.sessions.advance("ann", session.id, token, Reached(step, info.id, done=True))
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
    """Kill a process so long after it first said that something was kept; the lines that it printed."""
    assert process.stdout.readline() == "ready\n"
    first = process.stdout.readline()  # however long that takes on a slow disk
    time.sleep(seconds)
    process.send_signal(signal.SIGKILL)
    out, _ = process.communicate(timeout=DEADLINE_S)
    return [line.split() for line in (first + out).splitlines() if line.count(" ") == 3]


def test_a_kill_at_any_point_loses_nothing_that_was_kept(tmp_path):
    """After kill -9 of a writer again and again, all that it said was kept is there, and the books and bytes agree."""
    rng = random.Random(0)

    async def look(lines):
        limits = StoreLimits(hold_s=0.01, orphan_s=0.0, grace_s=0.0)
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
        steps += asyncio.run(look(killed_after(start(tmp_path, kill), 0.05 + 0.25 * rng.random())))
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
            await store.sessions.advance("ann", session.id, token, Reached(5, info.id, done=True))
            await store.snapshots.put("ann", stream(bytes(1 << 20)))
        async with await open_store(str(tmp_path)) as store:
            assert await store.upkeep.audit() == []
            names = [name async for name in store._place.blobs.names()]
            return (await store.sessions.get("ann", session.id)).position, len(names)

    assert asyncio.run(work()) == (5, 2)


@contextlib.contextmanager
def small_disk(folder, megabytes):
    """A file system of its own, and so small that it can be filled."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]
    refused = subprocess.run(mount, capture_output=True, text=True)
    if refused.returncode:
        pytest.skip(f"needs the right to mount a tmpfs: {refused.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def fill(file):
    """Take what is left of a disk, byte for byte."""
    with file.open("wb", buffering=0) as filler, contextlib.suppress(OSError):
        for size in (1 << 16, 1 << 10, 1):
            with contextlib.suppress(OSError):
                while filler.write(bytes(size)):
                    pass


@pytest.mark.skipif(sys.platform != "linux", reason="needs a tmpfs")
def test_room_can_be_made_on_a_full_disk(tmp_path):
    """With no byte left states are read and sessions deleted, and what they took is free; nothing new is taken."""

    async def work(disk):
        async with await open_store(str(disk / "states"), StoreLimits(hold_s=0.01)) as store:
            sessions = []
            for number in range(8):
                session = await store.sessions.create("ann")
                info = await store.snapshots.put("ann", stream(bytes([number]) * 200_000))
                sessions.append(await store.sessions.replace("ann", session.id, 5, info.id, instead_of=""))
            await asyncio.sleep(0.05)  # until nothing holds the states
            fill(disk / "filler")
            refused = 0
            while refused < 3:  # until the log has no room left either
                fill(disk / f"filler {refused}")
                try:
                    await store.sessions.create("ann")
                except StorageError:
                    refused += 1
            for number, session in enumerate(sessions):
                assert [bytes([number]) * 200_000] == [
                    piece async for piece in store.snapshots.get("ann", session.checkpoints[0].snapshot)
                ]
            with contextlib.suppress(StorageError):
                await store.sessions.create("ann")
            for session in sessions:
                await store.sessions.delete("ann", session.id)
            assert await store.upkeep.audit() == []
            assert (await store.snapshots.usage("ann")).bytes < 8 * 200_000
            info = await store.snapshots.put("ann", stream(b"new" * 1000))
            return info.size, (disk / "states" / "catalogue.sqlite-reserve").stat().st_size

    with small_disk(tmp_path / "disk", 8) as disk:
        assert asyncio.run(work(disk)) == (3000, 1 << 20)


@pytest.mark.skipif(sys.platform != "linux", reason="needs a tmpfs")
def test_a_store_can_be_opened_on_a_full_disk(tmp_path):
    """With no byte left what was kept is there again, as the log of the catalogue takes the room of the reserve."""

    async def kept(disk):
        async with await open_store(str(disk / "states"), StoreLimits(hold_s=0.01)) as store:
            session = await store.sessions.create("ann")
            info = await store.snapshots.put("ann", stream(b"state" * 1000))
            return await store.sessions.replace("ann", session.id, 5, info.id, instead_of="")

    async def again(disk, session):
        async with await open_store(str(disk / "states"), StoreLimits(hold_s=0.01)) as store:
            assert await store.upkeep.audit() == []
            found = [piece async for piece in store.snapshots.get("ann", session.checkpoints[0].snapshot)]
            await store.sessions.delete("ann", session.id)
            return found

    with small_disk(tmp_path / "disk", 8) as place:
        session = asyncio.run(kept(place))
        fill(place / "filler")
        assert asyncio.run(again(place, session)) == [b"state" * 1000]


def test_a_reserve_is_made_once_and_takes_its_room(tmp_path, monkeypatch):
    """One that another process makes at the same moment stays as it is, and no file system can compress it away."""

    async def reserve(folder):
        await (await DiskRecords.open(folder / "catalogue.sqlite")).close()
        return (folder / "catalogue.sqlite-reserve").read_bytes()

    def another_is_faster(path, flags):
        if path.endswith("-reserve"):
            Path(path).write_bytes(b"of another process")
        return private_opener(path, flags)

    alone = asyncio.run(reserve(tmp_path / "alone"))
    assert len(zlib.compress(alone)) >= len(alone) == 1 << 20
    monkeypatch.setattr(disk, "private_opener", another_is_faster)
    assert asyncio.run(reserve(tmp_path / "shared")) == b"of another process"


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


@contextlib.contextmanager
def umask(mask):
    """New files get these rights at most."""
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def rights(folder):
    """The rights of a folder and of all in it."""
    return {oct(stat.S_IMODE(path.stat().st_mode)) for path in (folder, *folder.rglob("*"))}


def test_no_other_user_can_read_the_store(tmp_path):
    """Folders are 0700 and files 0600 whatever the umask is: catalogue, its log, and states."""
    folder = tmp_path / "data" / "states"

    async def work():
        async with await open_store(str(folder)) as store:
            await store.snapshots.put("ann", stream(b"state"))
            assert (folder / "catalogue.sqlite-wal").exists() and (folder / "catalogue.sqlite-shm").exists()
            return rights(tmp_path / "data")

    with umask(0):
        assert asyncio.run(work()) == {"0o700", "0o600"}


def test_a_state_is_synced_with_every_name_on_the_way_to_it(tmp_path, monkeypatch):
    """The file, its folder and the folder of that, which is new to the disk too; at the start all that was missing."""
    synced, fsync = set(), os.fsync

    def recording(descriptor):
        synced.add(os.readlink(f"/proc/self/fd/{descriptor}").removeprefix(f"{tmp_path}/"))
        fsync(descriptor)

    async def work():
        async with await open_store(str(tmp_path / "data" / "states")) as store:
            at_start = synced.copy()
            synced.clear()
            await store.snapshots.put("ann", stream(b"state"))
            return at_start

    monkeypatch.setattr(os, "fsync", recording)
    assert asyncio.run(work()) >= {str(tmp_path), "data"}
    (blob,) = (tmp_path / "data/states/snapshots").glob("??/*")
    place = f"data/states/snapshots/{blob.parent.name}"
    assert synced >= {f"{place}/{blob.name}.writing", place, "data/states/snapshots", "data/states"}


def test_rights_of_others_are_taken_away(tmp_path):
    """A folder of ours that others may enter is closed with what is named in it; a shared one, or a link, stays."""
    folder, shared, outside = tmp_path / "states", tmp_path / "shared", tmp_path / "outside"
    with umask(0):
        (folder / "ab").mkdir(parents=True)
        (folder / "ab" / "state").write_bytes(b"state")
        outside.write_bytes(b"")
        (folder / "link").symlink_to(outside)
        shared.mkdir()
        shared.chmod(0o1777)
    closed = [tighten(place, ["a?", "link"], ["*"]) for place in (folder, folder, shared, folder / "no")]
    assert closed == [True, None, None, None]
    assert stat.S_IMODE(outside.stat().st_mode) == 0o666
    (folder / "link").unlink()
    assert rights(folder) == {"0o700", "0o600"} and rights(shared) == {"0o1777"}


def test_a_folder_with_other_things_in_it_keeps_its_rights(tmp_path):
    """Such as a home or a checkout: only what is named as ours is closed, with all in it, and nothing else changes."""
    with umask(0o022):
        (tmp_path / "snapshots" / "ab").mkdir(parents=True)
        (tmp_path / "snapshots" / "ab" / "state").write_bytes(b"state")
        (tmp_path / "page").mkdir()
        (tmp_path / "page" / "run.sh").write_text("")
        (tmp_path / "page" / "run.sh").chmod(0o755)
    tmp_path.chmod(0o755)
    assert tighten(tmp_path, ["snapshots"], ["snapshots"]) is False
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755
    assert rights(tmp_path / "page") == {"0o755"} and rights(tmp_path / "snapshots") == {"0o700", "0o600"}


def test_what_is_no_store_is_refused(tmp_path):
    """A catalogue that is another file, and a folder that cannot be one, are said with what to do."""
    (tmp_path / "catalogue.sqlite").write_bytes(b"not a database, but long enough to be looked at" * 20)
    (tmp_path / "file").write_text("")
    for address, words in (
        (tmp_path, "is damaged .* state repair"),
        (tmp_path / "file" / "folder", "cannot be opened"),
    ):
        with pytest.raises(StorageError, match=words):
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


def test_who_is_cancelled_leaves_no_file_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is opened for somebody who is gone by then is closed, and deleted where it was to be written."""
    begun, opened = threading.Event(), []
    real = BlobFolder.open

    def slow(folder: BlobFolder, *args: Any) -> BlobFile:
        begun.set()
        time.sleep(0.1)
        opened.append(real(folder, *args))
        return opened[-1]

    monkeypatch.setattr(BlobFolder, "open", slow)

    async def work() -> None:
        task = asyncio.create_task(DiskBlobs(tmp_path / "blobs").write("name", stream(b"data")))
        await asyncio.to_thread(begun.wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(work())
    assert [file.closed for file in opened] == [True]
    assert not [path for path in (tmp_path / "blobs").rglob("*") if path.is_file()]
