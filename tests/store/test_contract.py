"""What every store promises, wherever it keeps things: memory, local disk and Redis pass the same tests."""

import asyncio
import hashlib
import random

import pytest

from dist_attn.errors import (
    BusyError,
    ConflictError,
    InputError,
    QuotaError,
    StorageError,
    UnknownStateError,
)
from dist_attn.store import Reached, Usage
from dist_attn.store.entries import SessionRecord
from dist_attn.store.ports import new_name
from dist_attn.store.upkeep import Collected
from tests.support.stores import kept, read, stream, written

DATA = random.Random(0).randbytes(70_000)


def test_snapshots_stream_in_and_out(place):
    """Bytes come back as they went in, however they were cut, and equal bytes of one caller are kept once."""
    large = bytes(3 << 20) + DATA

    async def work(store):
        first = await store.snapshots.put("ann", stream(DATA, (1, 1, 50_000)))
        again = await store.snapshots.put("ann", stream(DATA))
        assert (first.id, first.size, first.digest) == (again.id, len(DATA), hashlib.sha256(DATA).hexdigest())
        assert await read(store, "ann", first.id) == DATA
        pieces = [piece async for piece in store.snapshots.get("ann", await kept(store, "ann", large))]
        assert b"".join(pieces) == large and max(map(len, pieces)) <= 1 << 20
        assert await store.snapshots.usage("ann") == Usage(len(DATA) + len(large), 2)
        return len([name async for name in store._place.blobs.names()])

    assert place.run(work) == 2


def test_callers_have_nothing_in_common(place):
    """Equal bytes of two callers have other ids, and whatever is somebody else's is as if it were not there."""

    async def work(store):
        ann, bob = await kept(store, "ann", DATA), await kept(store, "bob", DATA)
        assert ann != bob and "ann" not in ann
        session = await store.sessions.create("ann")
        await written(store, "ann", session, 8)
        key = store.prefixes.hasher("ann", "model", 1).update(b"\1\0\0\0")[0][1]
        attempts = [
            lambda: read(store, "bob", ann),
            lambda: store.snapshots.stat("bob", ann),
            lambda: store.snapshots.pin("bob", ann, 9),
            lambda: store.snapshots.unpin("bob", ann),
            lambda: store.snapshots.delete("bob", ann),
            lambda: store.sessions.get("bob", session.id),
            lambda: store.sessions.fork("bob", session.id),
            lambda: store.sessions.delete("bob", session.id),
            lambda: store.sessions.begin_append("bob", session.id, "key"),
            lambda: store.prefixes.remember("bob", key, 1, ann),
            lambda: read(store, "ann", "../../etc/passwd"),
        ]
        for attempt in attempts:
            with pytest.raises(UnknownStateError, match="there is no"):
                await attempt()
        _, token = await store.sessions.begin_append("ann", session.id, "next")
        with pytest.raises(UnknownStateError):
            await store.sessions.advance("ann", session.id, token, Reached(9, bob))
        assert [s.id for s in await store.sessions.listed("ann")] == [session.id]
        assert await store.sessions.listed("bob") == []
        return await store.snapshots.stat("ann", ann)

    assert place.run(work).references == 0


def test_a_session_ends_by_itself(place):
    """A session that is not used for its time is gone, and what it kept is collected; one that is used lives on."""

    async def work(store):
        short, long = [await store.sessions.create("ann", ttl_s=seconds) for seconds in (100, 1000)]
        for session in (short, long):
            await written(store, "ann", session, 4)
        place.clock.now += 99
        await written(store, "ann", short, 5)
        place.clock.now += 99
        assert (await store.sessions.get("ann", short.id)).position == 5
        place.clock.now += 2
        with pytest.raises(UnknownStateError, match="expired"):
            await store.sessions.get("ann", short.id)
        assert (await store.upkeep.collect()).sessions == 1
        place.clock.now += 1000
        await store.upkeep.collect()
        for life in (0, 1e-300, 0.99, 1e9):
            with pytest.raises(InputError, match="s was asked for; it may have 1 to 7"):
                await store.sessions.create("ann", ttl_s=life)
        return await store.snapshots.usage("ann")

    assert place.run(work, hold_s=1.0) == Usage()


def test_a_clock_that_is_set_wrong_ends_no_session(place):
    """Set ahead by more than a life it hides sessions and deletes none; once it is right they are there as before."""

    async def work(store):
        session = await written(store, "ann", await store.sessions.create("ann"), 4, DATA)
        pinned = await kept(store, "ann", DATA[:9])
        await store.snapshots.pin("ann", pinned, 3 * 86_400.0)
        before = await store.snapshots.usage("ann")
        place.clock.now += 1000
        assert await store.upkeep.collect() == Collected()
        place.clock.step = 8 * 86_400.0
        for _ in range(9):
            assert await store.upkeep.collect() == await store.upkeep.repair() == Collected()
            assert await store.sessions.listed("ann") == []
            with pytest.raises(UnknownStateError, match="expired"):
                await store.sessions.get("ann", session.id)
            place.clock.now += 11
        assert store.upkeep.grace.take_jump() == 8 * 86_400.0
        place.clock.step = 0.0
        await store.upkeep.collect()
        place.clock.now += 1000
        place.clock.step = 8 * 86_400.0
        assert await store.upkeep.collect() == Collected()
        place.clock.step = 0.0
        assert await store.sessions.listed("ann") == [session]
        assert await read(store, "ann", session.checkpoints[0].snapshot) == DATA
        assert await read(store, "ann", pinned) == DATA[:9]
        return await store.snapshots.usage("ann") == before

    assert place.run(work, grace_s=100.0)


def test_what_has_expired_goes_after_its_grace(place):
    """A clock that stays ahead is believed in the end, by the process that has seen it run evenly for so long."""

    async def work():
        async with place.open(grace_s=100.0) as store:
            session = await written(store, "ann", await store.sessions.create("ann"), 4, DATA)
            place.clock.step = 8 * 86_400.0
            await store.upkeep.collect()
            place.clock.now += 99
            assert await store.upkeep.collect() == Collected()
        async with place.open(grace_s=100.0) as store:  # a restart begins anew
            place.clock.now += 99
            assert await store.upkeep.collect() == Collected()
            place.clock.now += 1
            assert (await store.upkeep.collect()).sessions == 1
            with pytest.raises(UnknownStateError):
                await read(store, "ann", session.checkpoints[0].snapshot)
            return await store.upkeep.audit(), await store.snapshots.usage("ann")

    assert asyncio.run(work()) == ([], Usage())


def test_forks_share_bytes_and_nothing_else(place):
    """A fork copies nothing, and what is done to it or to its parent is not seen by the other."""

    async def work(store):
        parent = await store.sessions.create("ann")
        for position in (512, 1024, 1500):
            parent = await written(store, "ann", parent, position)
        before = await store.snapshots.usage("ann")
        child, early = (
            await store.sessions.fork("ann", parent.id),
            await store.sessions.fork("ann", parent.id, position=512),
        )
        after = await store.snapshots.usage("ann")
        assert (after.bytes, after.snapshots, after.sessions) == (before.bytes, before.snapshots, before.sessions + 2)
        assert (child.position, child.parent, early.position, early.parent_position) == (1500, parent.id, 512, 512)
        with pytest.raises(UnknownStateError, match="no checkpoint at 700; it has 512, 1024, 1500"):
            await store.sessions.fork("ann", parent.id, position=700)
        grown = await written(store, "ann", child, 1600)
        assert (await store.sessions.get("ann", parent.id)) == parent
        await store.sessions.delete("ann", parent.id)
        place.clock.now += 1000
        await store.upkeep.collect()
        states = [await read(store, "ann", point.snapshot) for point in (grown.checkpoints[0], early.checkpoints[0])]
        return states == [f"{parent.id} {position}".encode() for position in (1500, 512)]

    assert place.run(work)


def test_a_state_takes_the_place_of_another(place):
    """Only of the one that the caller names, and while nobody writes; what stood there before is let go of."""

    async def work(store):
        session, sessions = await store.sessions.create("ann", label="mine", metadata={"a": "b"}), store.sessions
        assert (session.label, session.metadata) == ("mine", {"a": "b"})
        first, other = await kept(store, "ann", b"first"), await kept(store, "ann", b"other")
        assert (await sessions.replace("ann", session.id, 700, first, instead_of="")).position == 700
        for wrong in ("", other):
            with pytest.raises(ConflictError, match="another one by now"):
                await sessions.replace("ann", session.id, 5, other, instead_of=wrong)
        _, token = await sessions.begin_append("ann", session.id, "")
        with pytest.raises(BusyError) as busy:
            await sessions.replace("ann", session.id, 5, other, instead_of=first)
        assert 0 < busy.value.retry_s <= 60 and (await sessions.get("ann", session.id)).busy_until > place.clock.now
        await sessions.stop_writing("ann", session.id, token)
        moved = await sessions.replace("ann", session.id, 5, other, instead_of=first)
        assert (moved.label, moved.busy_until) == ("mine", 0)
        assert (await store.totals()).snapshots == 2 and (await store.snapshots.stat("ann", first)).references == 0
        return await sessions.checkpoints("ann", session.id)

    ((point, info),) = place.run(work)
    assert (point.position, info.size, info.id) == (5, 5, point.snapshot)


def test_a_page_of_sessions_is_full(place):
    """Sessions that have ended do not count, so fewer than asked for means that there are no more."""

    async def work(store):
        names = [(await store.sessions.create("ann", ttl_s=10 if n % 2 else 1000)).id for n in range(9)]
        place.clock.now += 20
        living = sorted(name for n, name in enumerate(names) if n % 2 == 0)
        first = await store.sessions.listed("ann", limit=3)
        rest = await store.sessions.listed("ann", limit=3, after=first[-1].id)
        assert [session.id for session in first + rest] == living
        return len(first)

    assert place.run(work) == 3


def test_one_writes_at_a_time(place):
    """A second writer is refused while the first lives; one that was taken for dead can change nothing any more."""

    async def work(store):
        session, sessions = await store.sessions.create("ann"), store.sessions
        _, first = await sessions.begin_append("ann", session.id, "a")
        with pytest.raises(ConflictError, match="being written to"):
            await sessions.begin_append("ann", session.id, "b")
        place.clock.now += 50
        await sessions.keep_writing("ann", session.id, first)
        place.clock.now += 50
        with pytest.raises(ConflictError, match="being written to"):
            await sessions.begin_append("ann", session.id, "b")
        place.clock.now += 11
        _, second = await sessions.begin_append("ann", session.id, "b")
        snapshot = await kept(store, "ann", b"state")
        for late in (
            sessions.advance("ann", session.id, first, Reached(9, snapshot)),
            sessions.keep_writing("ann", session.id, first),
        ):
            with pytest.raises(ConflictError, match="given to another writer"):
                await late
        await sessions.stop_writing("ann", session.id, first)
        moved = await sessions.advance("ann", session.id, second, Reached(7, snapshot))
        with pytest.raises(ConflictError, match="cannot go back to 6"):
            await sessions.advance("ann", session.id, second, Reached(6, snapshot))
        return moved

    assert place.run(work).position == 7


def test_everything_has_a_bound(place):
    """Bytes, sessions, prefixes, checkpoints, remembered appends and the size of a snapshot are limited."""

    async def work(store):
        one, two = await store.sessions.create("ann"), await store.sessions.create("ann")
        with pytest.raises(QuotaError, match="has 2 sessions"):
            await store.sessions.create("ann")
        with pytest.raises(QuotaError, match="has 2 sessions"):
            await store.sessions.fork("ann", one.id)
        await store.sessions.create("bob")
        for position in range(1, 6):
            one = await written(store, "ann", one, position, bytes([position]) * 10)
        assert [point.position for point in one.checkpoints] == [3, 4, 5]
        record = await store._place.change(lambda ledger: ledger.find(SessionRecord, one.id))
        assert [append.position for append in record.appends] == [4, 5]
        with pytest.raises(StorageError, match="more than 100 bytes"):
            await kept(store, "ann", bytes(101))
        with pytest.raises(StorageError, match="empty snapshot"):
            await kept(store, "ann", b"")
        await kept(store, "ann", bytes(100))
        with pytest.raises(QuotaError, match="240 bytes of stored states are used up"):
            await kept(store, "ann", bytes(99))
        await kept(store, "ann", bytes(100))  # it is there already and takes nothing
        await kept(store, "bob", bytes(99))
        keys = [key for _, key in store.prefixes.hasher("ann", "m", 1).update(bytes(16))]
        for position, key in enumerate(keys):
            place.clock.now += 1
            await store.prefixes.remember("ann", key, position + 1, one.checkpoints[0].snapshot)
        found = [await store.prefixes.longest("ann", [(position + 1, key)]) for position, key in enumerate(keys)]
        assert [point is not None for point in found] == [False, False, True, True]
        with pytest.raises(InputError, match="not the key of a prefix"):
            await store.prefixes.remember("ann", "a/b", 1, one.checkpoints[0].snapshot)
        return two.id, await store.snapshots.usage("ann")

    limits = {
        "snapshot_bytes": 100,
        "tenant_bytes": 240,
        "tenant_sessions": 2,
        "tenant_prefixes": 2,
        "session_checkpoints": 3,
        "session_appends": 2,
    }
    assert place.run(work, **limits)[1].prefixes == 2


def test_the_longest_prefix_that_was_read_is_found(place):
    """Of a text that begins like one that was read, the last common grid point with a stored state is found."""
    tokens = random.Random(1).randbytes(4 * 1000)

    async def work(store):
        keys = dict(store.prefixes.hasher("ann", "model", 100).update(tokens))
        pieces = store.prefixes.hasher("ann", "model", 100)
        cut = [point for at in range(0, 4000, 37) for point in pieces.update(tokens[at : at + 37])]
        assert cut == list(keys.items()) and list(keys) == list(range(100, 1001, 100))
        for position in (200, 400, 900):
            await store.prefixes.remember(
                "ann", keys[position], position, await kept(store, "ann", f"{position}".encode())
            )

        async def longest(tenant, model, text, grid=100):
            found = await store.prefixes.longest(tenant, store.prefixes.hasher(tenant, model, grid).update(text))
            return found and found.position

        other = tokens[: 4 * 450] + bytes(4 * 400)
        found = [await longest("ann", "model", text) for text in (tokens, tokens[: 4 * 899], other, tokens[:400], b"")]
        assert found == [900, 400, 400, None, None]
        for tenant, model, grid in (("bob", "model", 100), ("ann", "other", 100), ("ann", "model", 50)):
            assert await longest(tenant, model, tokens, grid) is None
        point = await store.prefixes.longest("ann", list(keys.items()))
        assert await read(store, "ann", point.snapshot) == b"900"
        await store.prefixes.forget("ann", keys[900])
        await store.prefixes.forget("bob", keys[400])
        return await longest("ann", "model", tokens)

    assert place.run(work) == 400


def test_an_upload_that_fails_leaves_nothing(place):
    """When the bytes stop with an error, or the work is cancelled, no bytes and no records stay."""

    async def broken():
        yield DATA
        raise ConnectionResetError("gone")

    async def slow(taken):
        yield DATA
        taken.set()
        await asyncio.sleep(3600)
        yield DATA

    async def left(store):
        return await store.snapshots.usage("ann"), [name async for name in store._place.blobs.names()]

    async def work(store):
        with pytest.raises((ConnectionResetError, StorageError)):
            await store.snapshots.put("ann", broken())
        taken = asyncio.Event()
        task = asyncio.create_task(store.snapshots.put("ann", slow(taken)))
        await taken.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await left(store)

    async def late(store):
        with pytest.raises(StorageError, match="did not come within"):
            await store.snapshots.put("ann", slow(asyncio.Event()))
        return await left(store)

    assert place.run(work) == place.run(late, orphan_s=0.4) == (Usage(), [])


def test_many_at_once_do_not_disturb_each_other(place):
    """Of many writers at once exactly one gets a session, and sums and references agree after forks from all sides."""

    async def work(store):
        async with place.open() as other:
            session = await store.sessions.create("ann")
            await written(store, "ann", session, 3)
            stores = [store, other] * 6
            begun = await asyncio.gather(
                *(s.sessions.begin_append("ann", session.id, f"k{n}") for n, s in enumerate(stores)),
                return_exceptions=True,
            )
            assert sum(isinstance(result, tuple) for result in begun) == 1
            forks = await asyncio.gather(*(s.sessions.fork("ann", session.id) for s in stores))
            await asyncio.gather(*(written(s, "ann", f, 9, DATA) for s, f in zip(stores, forks, strict=True)))
            await asyncio.gather(*(s.sessions.delete("ann", f.id) for s, f in zip(stores[:6], forks[:6], strict=True)))
            return await store.snapshots.usage("ann")

    usage = place.run(work)
    assert (usage.sessions, usage.snapshots) == (7, 2)


def test_what_is_kept_is_there_after_opening_again(place):
    """Sessions, snapshots, prefixes and ids outlive the closing of a store, and bytes without a record are swept."""

    async def first(store):
        session = await written(store, "ann", await store.sessions.create("ann"), 12, DATA)
        key = store.prefixes.hasher("ann", "m", 1).update(bytes(4))[0][1]
        await store.prefixes.remember("ann", key, 1, session.checkpoints[0].snapshot)
        await store._place.blobs.write("00000000ff" + "ab" * 16, stream(b"left behind"))
        return session, key

    session, key = place.run(first)

    async def second(store):
        assert await store.sessions.get("ann", session.id) == session
        assert await read(store, "ann", session.checkpoints[0].snapshot) == DATA
        assert (await store.prefixes.longest("ann", [(1, key)])).snapshot == session.checkpoints[0].snapshot
        assert await kept(store, "ann", DATA) == session.checkpoints[0].snapshot
        return [name async for name in store._place.blobs.names()]

    assert len(place.run(second)) == 1


async def _written_elsewhere(store, data, now):
    """The name, digest and size of bytes that another process has written."""
    name = new_name(now)
    await store._place.blobs.write(name, stream(data))
    return name, hashlib.sha256(data).hexdigest(), len(data)


def test_what_another_process_has_written_is_taken_over(place):
    """It is as if it had been put: the same id, once for a caller; and it is lent by the name of its bytes."""

    async def work(store):
        blob = await _written_elsewhere(store, DATA, place.clock())
        info = await store.snapshots.take_over("ann", *blob)
        again = await store.snapshots.take_over("ann", *await _written_elsewhere(store, DATA, place.clock()))
        assert info.id == again.id == await kept(store, "ann", DATA) and await read(store, "ann", info.id) == DATA
        record = await store.snapshots.lend("ann", info.id)
        assert (record.blob, record.digest, record.size) == blob
        with pytest.raises(UnknownStateError):
            await store.snapshots.lend("bob", info.id)
        assert await store.snapshots.usage("ann") == Usage(len(DATA), 1)
        return [name async for name in store._place.blobs.names()] == [blob[0]]

    assert place.run(work)


def test_taken_over_twice_nothing_goes(place):
    """The same bytes entered again, as where an answer was lost, stay, and so do all others."""

    async def work(store):
        other = await kept(store, "bob", b"other")
        blob = await _written_elsewhere(store, DATA, place.clock())
        first, second = [await store.snapshots.take_over("ann", *blob) for _ in range(2)]
        assert first == second and await store.snapshots.usage("ann") == Usage(len(DATA), 1)
        return await read(store, "ann", first.id) + await read(store, "bob", other)

    assert place.run(work) == DATA + b"other"


def test_what_cannot_be_taken_over_leaves_nothing(place):
    """A state that is not here, too old to be kept from the sweep, too large, or over a quota is refused in words."""

    async def work(store):
        take_over = store.snapshots.take_over
        elsewhere = (new_name(place.clock()), "00" * 32, 9)
        with pytest.raises(StorageError, match="the same store"):
            await take_over("ann", *elsewhere)
        late = await _written_elsewhere(store, bytes(50), place.clock() - 11)
        with pytest.raises(StorageError, match="the same time"):
            await take_over("ann", *late)
        await store.snapshots.discard(late[0])
        with pytest.raises(StorageError, match="has 200 bytes, and 100 is the limit"):
            await take_over("ann", *await _written_elsewhere(store, bytes(200), place.clock()))
        with pytest.raises(QuotaError):
            for fill in b"ab":
                await take_over("ann", *await _written_elsewhere(store, bytes([fill]) * 80, place.clock()))
        return len([name async for name in store._place.blobs.names()])

    assert place.run(work, orphan_s=20.0, snapshot_bytes=100, tenant_bytes=150) == 1


def test_what_nobody_takes_over_is_swept_away(place):
    """A process that dies between the engine's write and its record leaves bytes, which go after a while."""

    async def work(store):
        blob = await _written_elsewhere(store, DATA, place.clock())
        assert (await store.upkeep.repair()).orphans == 0 and await store._place.blobs.has(blob[0])
        place.clock.now += 21
        assert (await store.upkeep.repair()).orphans == 1
        return await store._place.blobs.has(blob[0])

    assert not place.run(work, orphan_s=20.0)


def test_a_place_has_one_name(place):
    """Whoever opens it learns the same name, which no sweep takes for a blob."""

    async def work(store):
        await store.upkeep.repair()
        assert not [name async for name in store._place.blobs.names()]
        return await store._place.blobs.place()

    names = {place.run(work) for _ in range(3)}
    assert len(names) == 1 and len(names.pop()) == 32
