"""Collection, eviction, repair and audit of every store: what is needed stays, and the books agree with the bytes."""

import asyncio
import hashlib
import random

import pytest

from dist_attn.errors import ConflictError, QuotaError, StateDamagedError, StorageError, UnknownStateError
from dist_attn.store import Usage
from dist_attn.store.entries import SnapshotRecord
from dist_attn.store.ledger import all_records, changed
from tests.support.stores import kept, place_of, read, stream, written

DATA = random.Random(0).randbytes(70_000)


def test_what_nobody_needs_goes_and_what_is_needed_stays(place):
    """A snapshot goes once nothing refers to it and its time is over; a reference keeps it, and a pin that stays."""

    async def work(store):
        loose, pinned, used, freed = [await kept(store, "ann", DATA[:n]) for n in (10, 20, 30, 40)]
        session = await store.sessions.create("ann", ttl_s=10_000)
        await written(store, "ann", session, 4, DATA[:30])
        for name in (pinned, freed):
            await store.snapshots.pin("ann", name, 5000)
        for name in (freed, used):
            await store.snapshots.unpin("ann", name)
        await store.upkeep.collect()
        assert (await store.snapshots.stat("ann", loose)).references == 0
        place.clock.now += 301
        assert (await store.upkeep.collect()).snapshots == 2
        with pytest.raises(UnknownStateError):
            await read(store, "ann", loose)
        place.clock.now += 4000
        await store.upkeep.collect()
        assert [len(await read(store, "ann", name)) for name in (pinned, used)] == [20, 30]
        with pytest.raises(ConflictError, match="referred to 1 times"):
            await store.snapshots.delete("ann", used)
        await store.snapshots.delete("ann", pinned)
        place.clock.now += 2000
        await store.sessions.delete("ann", session.id)
        await store.upkeep.collect()
        return await store.snapshots.usage("ann"), [name async for name in store._place.blobs.names()]

    assert place.run(work) == (Usage(), [])


def test_a_full_store_lets_go_of_what_is_needed_least(place):
    """Snapshots without reference go first, then prefixes, then older checkpoints, and a newest state never."""

    async def work(store):
        session = await store.sessions.create("ann")
        for position in (1, 2, 3):
            session = await written(store, "ann", session, position, bytes([position]) * 100)
        prefix = await kept(store, "ann", b"p" * 100)
        key = store.prefixes.hasher("ann", "m", 1).update(bytes(4))[0][1]
        await store.prefixes.remember("ann", key, 1, prefix)
        place.clock.now += 1000
        loose = await kept(store, "ann", b"l" * 100)
        place.clock.now += 1000

        async def left():
            found = [loose, prefix, *(point.snapshot for point in session.checkpoints)]
            stored = await all_records(store._place.records, SnapshotRecord)
            return [name in stored for name in found]

        steps = []
        for letter in b"abcdef":
            try:
                fresh = await kept(store, "ann", bytes([letter]) * 100)
            except StorageError as error:
                assert "cannot take 100 more" in str(error)
            else:
                await store.snapshots.pin("ann", fresh, 10_000)
            steps.append(await left())
        assert (await store.sessions.get("ann", session.id)).position == 3
        return steps

    assert place.run(work, store_bytes=500) == [
        [False, True, True, True, True],
        [False, False, True, True, True],
        [False, False, False, False, True],
        [False, False, False, False, True],
        [False, False, False, False, True],
        [False, False, False, False, True],
    ]


def test_nothing_is_evicted_in_vain(place):
    """What something else needs or still holds is not dropped, as that makes no room, and the put is refused."""

    async def work(store):
        session = await store.sessions.create("ann")
        for position in (1, 2):
            session = await written(store, "ann", session, position, bytes([position]) * 100)
        keys = [key for _, key in store.prefixes.hasher("ann", "m", 1).update(bytes(8))]
        fresh = await kept(store, "ann", b"f" * 100)
        for key, snapshot in zip(keys, (fresh, session.checkpoints[1].snapshot), strict=True):
            await store.prefixes.remember("ann", key, 1, snapshot)
        with pytest.raises(StorageError, match="cannot take 100 more"):
            await kept(store, "bob", b"b" * 100)
        assert (await store.snapshots.usage("ann")).prefixes == 2
        assert await store.sessions.get("ann", session.id) == session
        place.clock.now += 301
        await kept(store, "bob", b"b" * 100)
        return (await store.snapshots.usage("ann")).prefixes, await store.sessions.get("ann", session.id) == session

    assert place.run(work, store_bytes=300) == (1, True)


def test_a_callers_own_prefixes_make_room_for_its_sessions(place):
    """Where a caller's share is full of prefixes, they go for its session's next state, and no other caller's do."""

    async def work(store):
        for tenant in ("ann", "bob"):
            for position, key in store.prefixes.hasher(tenant, "m", 1).update(bytes(8)):
                await store.prefixes.remember(tenant, key, position, await kept(store, tenant, bytes([position]) * 100))
        place.clock.now += 301
        session = await written(store, "ann", await store.sessions.create("ann"), 5, b"s" * 150)
        return session.position, [(await store.snapshots.usage(tenant)).prefixes for tenant in ("ann", "bob")]

    assert place.run(work, tenant_bytes=200) == (5, [0, 2])


def test_no_checkpoint_goes_for_a_state_that_can_be_done_without(place):
    """A spare snapshot takes the room of prefixes; where only checkpoints of sessions are left it is refused."""

    async def work(store):
        session = await store.sessions.create("ann")
        for position in (5, 9):
            session = await written(store, "ann", session, position, bytes([position]) * 100)
        ((position, key),) = store.prefixes.hasher("ann", "m", 1).update(bytes(4))
        await store.prefixes.remember("ann", key, position, await kept(store, "ann", b"p" * 100))
        place.clock.now += 301
        spare = await store.snapshots.put("ann", stream(b"q" * 100), spare=True)
        with pytest.raises(QuotaError):
            await store.snapshots.put("ann", stream(b"r" * 150), spare=True)
        left = await store.sessions.get("ann", session.id)
        return spare.size, len(left.checkpoints), (await store.snapshots.usage("ann")).prefixes

    assert place.run(work, tenant_bytes=300) == (100, 2, 0)


def test_damaged_bytes_are_not_passed_off_as_sound(place):
    """Bytes that have changed where they lie, or are gone, end in an error that names the snapshot."""

    async def work():
        async with place.open() as store:
            name = await kept(store, "ann", DATA)
            record = await store._place.change(lambda ledger: ledger.find(SnapshotRecord, name))
            await store._place.blobs.delete(record.blob)
            with pytest.raises(StateDamagedError, match=record.blob):
                await read(store, "ann", name)
            assert await store.upkeep.audit() == [f"the bytes of snapshot {name} are missing"]
            await store._place.blobs.write(record.blob, stream(DATA[:-1] + b"\0"))
            with pytest.raises(StateDamagedError, match=f"{name} is damaged"):
                await store.snapshots.check("ann", name)
            assert await kept(store, "ann", DATA) == name  # the same bytes again mend it
            assert await read(store, "ann", name) == DATA and await store.upkeep.audit() == []
            await store._place.change(lambda ledger: _miscount(ledger, name))
            return await store.upkeep.audit()

    assert "counts 3 references; there are 0" in asyncio.run(work())[0]


@pytest.mark.parametrize("size", [10, (3 << 20) + 5])
def test_damaged_bytes_are_never_handed_out_whole(place, size):
    """The last piece of a snapshot is withheld until all of its bytes are known to be those that were stored."""
    data = random.Random(1).randbytes(size)

    async def work(store):
        name = await kept(store, "ann", data)
        record = await store._place.change(lambda ledger: ledger.find(SnapshotRecord, name))
        await store._place.blobs.delete(record.blob)
        await store._place.blobs.write(record.blob, stream(bytes([data[0] ^ 1]) + data[1:]))
        seen = 0
        with pytest.raises(StateDamagedError, match="not those that were stored"):
            async for piece in store.snapshots.get("ann", name):
                seen += len(piece)
        return seen

    assert place.run(work) < size


async def _miscount(ledger, name):
    record = await ledger.find(SnapshotRecord, name)
    await ledger.save(name, changed(record, references=3), record)


@pytest.mark.parametrize("seed", range(2))
def test_the_books_agree_after_anything(place, seed):
    """After any mixture of changes, expiry and eviction, references and sums are right, and all places agree."""

    async def work(store):
        rng, sessions, outcomes = random.Random(seed), [], []
        for step in range(60):
            tenant = rng.choice(("ann", "bob"))
            place.clock.now += rng.choice((0, 1, 400))
            known = [s for t, s in sessions if t == tenant] or [None]
            session = rng.choice(known)
            try:
                match rng.randrange(8):
                    case 0 | 1:
                        sessions.append((tenant, await store.sessions.create(tenant, ttl_s=rng.choice((500, 9000)))))
                    case 2 | 3 if session:
                        await written(store, tenant, session, step + 1, bytes([rng.randrange(6)]) * 100)
                    case 4 if session:
                        sessions.append((tenant, await store.sessions.fork(tenant, session.id)))
                    case 5 if session:
                        snapshot = await kept(store, tenant, bytes([rng.randrange(6)]) * 100)
                        key = hashlib.sha256(bytes([rng.randrange(9)]) + tenant.encode()).hexdigest()
                        await store.prefixes.remember(tenant, key, step, snapshot)
                    case 6 if session:
                        await store.sessions.delete(tenant, session.id)
                    case _:
                        await store.upkeep.collect()
                outcomes.append("done")
            except (UnknownStateError, ConflictError, QuotaError, StorageError) as error:
                outcomes.append(type(error).__name__)
            if step % 10 == 0:
                assert await store.upkeep.audit() == []
        return outcomes

    outcomes = place.run(work, store_bytes=700, tenant_bytes=500, tenant_sessions=5, tenant_prefixes=3)
    with place_of("memory", None) as memory:
        place = memory
        assert memory.run(work, store_bytes=700, tenant_bytes=500, tenant_sessions=5, tenant_prefixes=3) == outcomes
    assert len(set(outcomes)) >= 3
