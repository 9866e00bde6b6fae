"""Keepers of states: a state is there whole or not at all, and the last one stays until the next is whole."""

import asyncio
import hashlib
import select
import subprocess
import sys
import threading
import time
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from dist_attn.control.state_files import PREFIX, StateFiles, StoredBlob
from dist_attn.control.store_workers import AT_ONCE, StoreWorkers
from dist_attn.errors import StateDamagedError, StorageError, WireError
from dist_attn.store.disk import DiskBlobs
from dist_attn.store.files import BlobFolder
from dist_attn.wire.messages import BeginState
from tests.support.fake_rank import fake_snapshot
from tests.support.states import MemoryStates


@pytest.fixture(params=["files", "memory"])
def keeper(request, tmp_path):
    """Each kind of keeper, without states."""
    if request.param == "memory":
        yield MemoryStates()
    else:
        with _files(tmp_path) as files:
            yield files


@contextmanager
def _files(folder, store="store", deadline_s=60.0):
    """Files in a folder, and a store beside them."""
    with closing(StoreWorkers(str(folder / store), deadline_s)) as workers:
        yield StateFiles(folder, workers)


def _commit(keeper, request, ordinal, num_bytes):
    """What has come takes the place of the request's last state, if it is whole."""
    return keeper.finish(request, ordinal, num_bytes) and keeper.commit(request, ordinal)


def test_the_last_whole_state_is_kept(keeper):
    """Parts become the state when all of them are there; a later state takes its place when it is whole."""
    keeper.append(1, 0, 0, b"ab")
    keeper.append(1, 0, 2, b"cd")
    assert _commit(keeper, 1, 0, 4)
    assert b"".join(keeper.parts(1)) == b"abcd"
    keeper.append(1, 0, 0, b"xy")
    assert b"".join(keeper.parts(1)) == b"abcd"
    assert not _commit(keeper, 1, 0, 4)
    assert b"".join(keeper.parts(1)) == b"abcd"
    assert _commit(keeper, 1, 0, 2)
    assert b"".join(keeper.parts(1)) == b"xy"


def test_a_gap_makes_no_state(keeper):
    """A part that does not follow is not taken, so the state is never whole."""
    keeper.append(1, 0, 0, b"ab")
    keeper.append(1, 0, 3, b"d")
    assert not _commit(keeper, 1, 0, 4)


def test_states_do_not_mix(keeper):
    """The parts of two states of one request stay apart."""
    keeper.append(1, 0, 0, b"ab")
    keeper.append(1, 1, 0, b"xy")
    keeper.append(1, 0, 2, b"cd")
    assert _commit(keeper, 1, 0, 4)
    assert b"".join(keeper.parts(1)) == b"abcd"


def test_what_was_not_whole_is_forgotten(keeper):
    """After a loss, parts of states that never came whole count no more; whole ones do."""
    keeper.append(1, 0, 0, b"ab")
    assert _commit(keeper, 1, 0, 2)
    keeper.append(1, 0, 0, b"x")
    keeper.forget_unfinished()
    keeper.append(1, 0, 1, b"y")
    assert not _commit(keeper, 1, 0, 2)
    assert b"".join(keeper.parts(1)) == b"ab"


def test_an_empty_state_is_a_state(keeper):
    """Models without a state between blocks have one of no bytes."""
    assert _commit(keeper, 1, 0, 0)
    assert b"".join(keeper.parts(1)) == b""


def test_finished_states_wait_side_by_side(keeper):
    """Later states come while earlier ones wait for their turn; a loss of ranks forgets those that waited."""
    for ordinal, data in ((4, b"ab"), (8, b"cd"), (9, b"ef")):
        keeper.append(1, ordinal, 0, data)
        assert keeper.finish(1, ordinal, 2)
    assert keeper.commit(1, 4) and b"".join(keeper.parts(1)) == b"ab"
    assert keeper.commit(1, 8) and b"".join(keeper.parts(1)) == b"cd"
    keeper.forget_unfinished()
    assert not keeper.commit(1, 9)
    assert b"".join(keeper.parts(1)) == b"cd"


def test_a_dropped_session_leaves_nothing(keeper, tmp_path):
    """Neither its state nor parts of the next one stay."""
    keeper.append(1, 0, 0, b"ab")
    _commit(keeper, 1, 0, 2)
    keeper.append(1, 1, 0, b"x")
    keeper.append(11, 0, 0, b"x")
    keeper.drop(1)
    assert not _commit(keeper, 1, 1, 1)
    assert _commit(keeper, 11, 0, 1)
    assert len(list(tmp_path.glob(f"{PREFIX}*/*"))) == isinstance(keeper, StateFiles)


def test_what_killed_controllers_left_is_removed(tmp_path):
    """A folder that no process holds is removed; one of a living process is not, whatever ids its container gives."""
    gone, other = tmp_path / f"{PREFIX}abc", tmp_path / "other"
    for folder in (gone, other):
        folder.mkdir()
    with _files(tmp_path) as living, _files(tmp_path) as kept:
        assert not gone.exists() and living.folder.exists() and other.exists()
        kept.close()
        assert not kept.folder.exists() and living.folder.exists()


def test_a_folder_that_cannot_be_written_keeps_no_state(tmp_path):
    """Where nothing can be written, no state is kept, and nothing else goes wrong."""
    with _files(tmp_path) as kept:
        kept.close()
        kept.append(1, 0, 0, b"ab")
        assert not _commit(kept, 1, 0, 2)
        assert not Path(kept.folder).exists()


def test_a_state_that_cannot_be_read_ends_nothing(tmp_path):
    """A file that somebody has removed gives no parts, so its ranks refuse the state; the controller goes on."""
    with _files(tmp_path) as kept:
        kept.append(1, 0, 0, b"ab")
        assert _commit(kept, 1, 0, 2)
        kept.close()
        assert list(kept.parts(1)) == []


def _heard(keeper, begin):
    """What `begin` comes to, which gets a function for its result."""
    came = []
    begin(came.append)
    deadline = time.monotonic() + 60
    while not came:
        assert time.monotonic() < deadline
        if isinstance(keeper, MemoryStates):
            keeper.take_results()
        else:
            select.select([keeper._store], [], [], 1)
            keeper._store.take_results()
    return came[0]


def _await_place(keeper):
    """Have it learn the name of its store."""
    while not keeper.place:
        select.select([keeper._store], [], [], 1)
        keeper._store.take_results()


def _stored(keeper, data, request=1, ordinal=1):
    """The blob of a state that a rank has saved."""
    keeper.append(request, ordinal, 0, data)
    assert _commit(keeper, request, ordinal, len(data)) and keeper.hold(request, ordinal)
    return _heard(keeper, lambda then: keeper.put(request, ordinal, then))


def _fetched(keeper, position, blob, request=2, max_bytes=1 << 20):
    """The header of a state that a request begins with, or the error."""
    return _heard(keeper, lambda then: keeper.fetch(request, BeginState(position, *blob), max_bytes, then))


def test_a_stored_state_is_begun_with_and_survives_a_loss(keeper):
    """A state that is written under a name is read by it; what comes from the store is no part of what ranks lose."""
    data = fake_snapshot(700, 3)
    blob = _stored(keeper, data)
    assert (blob.digest, blob.num_bytes) == (hashlib.sha256(data).hexdigest(), len(data))
    keeper.drop(1)
    assert _fetched(keeper, 700, blob).position == 700
    keeper.forget_unfinished()
    assert keeper.begun(2) and b"".join(keeper.parts(2)) == data


def test_a_state_that_is_handed_out_stays_while_others_follow(keeper, tmp_path):
    """Its bytes are those that it had when it was held, whenever they are written to the store."""
    states = [fake_snapshot(position, 3) for position in (1, 2)]
    for ordinal, data in enumerate(states):
        keeper.append(1, ordinal, 0, data)
        assert _commit(keeper, 1, ordinal, len(data)) and keeper.hold(1, ordinal)
    keeper.forget_unfinished()
    blobs = [_heard(keeper, lambda then, ordinal=ordinal: keeper.put(1, ordinal, then)) for ordinal in (0, 1)]
    assert [blob.digest for blob in blobs] == [hashlib.sha256(data).hexdigest() for data in states]
    keeper.drop(1)
    assert not list(tmp_path.glob(f"{PREFIX}*/*"))


@pytest.mark.parametrize("spoilt", ["gone", "longer", "changed", "no snapshot", "too large"])
def test_a_state_that_is_none_is_refused(tmp_path, spoilt):
    """Bytes that are not those that were stored are damaged; those that were stored are still checked as a snapshot."""
    with _files(tmp_path) as keeper:
        blob = _stored(keeper, b"no snapshot" if spoilt == "no snapshot" else fake_snapshot(700, 3))
        (file,) = (tmp_path / "store").glob(f"snapshots/*/{blob.name}")
        match spoilt:
            case "gone":
                file.unlink()
            case "longer":
                file.write_bytes(file.read_bytes() + bytes(1 << 21))
            case "changed":
                file.write_bytes(file.read_bytes()[:-1] + b"?")
        error = _fetched(keeper, 700, blob, max_bytes=1 if spoilt == "too large" else 1 << 20)
    assert isinstance(error, WireError if spoilt in ("no snapshot", "too large") else StateDamagedError), error


def test_a_store_that_takes_nothing_says_why(tmp_path):
    """A state that cannot be written there stays with the controller; the reason is told."""
    (tmp_path / "store").write_bytes(b"")  # no folder can be made there
    with _files(tmp_path) as keeper:
        error = _stored(keeper, b"ab")
        assert isinstance(error, StorageError) and "could not be written" in str(error)
        assert b"".join(keeper.parts(1)) == b"ab"


def test_a_store_that_does_not_answer_has_a_deadline(tmp_path, monkeypatch):
    """What takes longer is given up, and its place goes to others."""

    async def hang(*_):
        await asyncio.sleep(3600)

    monkeypatch.setattr(DiskBlobs, "write", hang)
    with _files(tmp_path, deadline_s=0.05) as keeper:
        for ordinal in range(20):
            error = _stored(keeper, b"ab", ordinal=ordinal)
            assert isinstance(error, StorageError) and "over 0.05 s" in str(error)


def _blobs(folder):
    """The files of all blobs in the store beside a keeper, half-written ones too."""
    return [*(folder / "store").glob("snapshots/*/*")]


@pytest.mark.parametrize("hanging", ["finish", "close"])
def test_a_store_that_hangs_has_a_deadline(tmp_path, monkeypatch, hanging):
    """No call that hangs in the system is waited for, nor the thread that it keeps; a blob that comes late goes."""
    released, finish = threading.Event(), BlobFolder.finish

    def slow(self, name, file):
        finish(self, name, file)
        released.wait()

    async def never(self):
        await asyncio.to_thread(released.wait)

    with _files(tmp_path, deadline_s=2) as keeper:
        _await_place(keeper)
        if hanging == "finish":
            monkeypatch.setattr(BlobFolder, "finish", slow)
        else:
            monkeypatch.setattr(DiskBlobs, "close", never)
        try:
            for ordinal in range(AT_ONCE + 1):
                keeper.append(1, ordinal, 0, b"ab")
                assert _commit(keeper, 1, ordinal, 2) and keeper.hold(1, ordinal)
            came = []
            for ordinal in range(AT_ONCE):
                keeper.put(1, ordinal, came.append)
            _heard(keeper, lambda then: keeper.put(1, AT_ONCE, then))
            assert len(came) == AT_ONCE and _blobs(tmp_path)
            assert all(isinstance(error, StorageError) and "over 2 s" in str(error) for error in came)
        finally:
            released.set()
        deadline = time.monotonic() + 60
        while _blobs(tmp_path) and time.monotonic() < deadline:
            select.select([keeper._store], [], [], 0.1)
            keeper._store.take_results()
        assert not _blobs(tmp_path) and len(came) == AT_ONCE


def test_a_store_that_hangs_lets_its_process_end(tmp_path):
    """No thread of the store is waited for at the end."""
    script = f"""
import asyncio, select, threading
from dist_attn.control.store_workers import StoreWorkers

async def hang(_):
    await asyncio.to_thread(threading.Event().wait)

workers, came = StoreWorkers({str(tmp_path)!r}, 0.1), []
workers.run(hang, came.append)
while not came:
    select.select([workers], [], [], 0.1)
    workers.take_results()
workers.close()
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_copies_that_nobody_waits_for_keep_nobody_waiting(tmp_path, monkeypatch):
    """Who cancels gives the threads back, whether the copy waits or is under way."""

    async def endless(*_):
        while True:
            await asyncio.sleep(0)
            yield b""

    monkeypatch.setattr(DiskBlobs, "read", endless)
    with _files(tmp_path) as keeper:
        came = []
        for request in range(2, 2 + 3 * AT_ONCE):
            keeper.fetch(request, BeginState(700, "00" * 21, "00" * 32, 200), 1 << 20, came.append)
        for request in range(2, 2 + 3 * AT_ONCE):
            keeper.drop(request)
        assert _stored(keeper, b"ab").num_bytes == 2
        while len(came) < 3 * AT_ONCE:
            select.select([keeper._store], [], [], 1)
            keeper._store.take_results()
        assert all(isinstance(error, StorageError) for error in came)


@pytest.mark.parametrize("written", [False, True])
def test_a_state_that_is_dropped_while_it_is_written_leaves_no_blob(tmp_path, monkeypatch, written):
    """It is written no further; where it was written already its blob is told, to be discarded."""
    write = DiskBlobs.write

    async def drop(self, name, pieces):
        async def after_drop():
            async for piece in pieces:
                if not written:
                    keeper.drop(1)
                yield piece

        await write(self, name, after_drop())
        keeper.drop(1)

    monkeypatch.setattr(DiskBlobs, "write", drop)
    with _files(tmp_path) as keeper:
        stored = _stored(keeper, bytes(3 << 20))
        assert isinstance(stored, StoredBlob) is written and len(_blobs(tmp_path)) == written


def test_a_store_is_known_by_a_name(tmp_path):
    """All that use a place learn the same name of it, whoever comes first; another place has another one."""
    with _files(tmp_path) as one, _files(tmp_path) as two, _files(tmp_path, "other") as other:
        for keeper in (one, two, other):
            _await_place(keeper)
        assert one.place == two.place != other.place
