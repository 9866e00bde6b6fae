"""The store in Redis: what is wrong with the server is said in words and leaves the store sound."""

import asyncio
import builtins
import contextlib
import sys

import pytest

from dist_attn.errors import MissingExtraError, StorageError
from dist_attn.store import Usage, open_store
from dist_attn.store.open import open_records
from tests.support.stores import started_redis, stream, why_no_redis

pytestmark = pytest.mark.skipif(bool(why_no_redis()), reason=why_no_redis())


def test_a_server_without_memory_is_a_storage_error():
    """When Redis has used its memory a put is refused, nothing of it stays, and what was kept before is there."""

    async def work(url):
        async with await open_store(url) as store:
            kept = await store.snapshots.put("ann", stream(b"small" * 1000))
            with pytest.raises(StorageError, match="raise maxmemory"):
                await store.snapshots.put("ann", stream(bytes(64 << 20)))
            await store._place.records._client.config_set("maxmemory", 0)
            assert await store.upkeep.audit() == []
            assert b"".join([piece async for piece in store.snapshots.get("ann", kept.id)]) == b"small" * 1000
            return [name async for name in store._place.blobs.names()]

    with started_redis("--maxmemory", "16mb", "--maxmemory-policy", "noeviction") as (url, _):
        assert len(asyncio.run(work(url))) == 1


def test_a_server_that_goes_away_is_a_storage_error():
    """Every call after the server has ended fails in words and at once, and so does opening."""

    async def work(url, process):
        async with await open_store(url) as store:
            kept = await store.snapshots.put("ann", stream(b"data"))
            process.kill()
            process.wait()
            for call in (
                store.snapshots.stat("ann", kept.id),
                store.sessions.create("ann"),
                store.snapshots.put("ann", stream(b"more")),
            ):
                with pytest.raises(StorageError, match="Redis did not do as asked"):
                    await call
        with pytest.raises(StorageError, match="Redis did not do as asked"):
            await open_store(url)
        return kept.size

    with started_redis() as (url, process):
        assert asyncio.run(work(url, process)) == 4


def test_a_change_whose_answer_is_lost_is_made_once(tmp_path):
    """Where the connection breaks between a change and its answer, the change is found made, and not made again."""

    async def add(transaction):
        count = int(await transaction.get("count") or b"0") + 1
        transaction.put("count", str(count).encode())
        return count

    async def work(url):
        lost, path, passing = [], str(tmp_path / "proxy.sock"), []

        async def pass_on(reader, writer):
            passing.append(asyncio.current_task())
            answers, asks = await asyncio.open_unix_connection(url.removeprefix("unix://"))
            back = asyncio.create_task(copy(answers, writer))
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                while data := await reader.read(1 << 16):
                    asks.write(data)
                    if b"EXEC" in data and not lost:
                        lost.append(data)
                        back.cancel()
                        await asyncio.wait([back])
                        await answers.read(1 << 16)
                        break
            back.cancel()
            for end in (writer, asks):
                end.close()
                with contextlib.suppress(ConnectionError):
                    await end.wait_closed()

        async def copy(answers, writer):
            while data := await answers.read(1 << 16):
                writer.write(data)

        async with await asyncio.start_unix_server(pass_on, path):
            records = await open_records(f"unix://{path}")
            counts = [await records.transact(add) for _ in range(2)]
            await records.close()
            await asyncio.gather(*passing)
        return len(lost), counts

    with started_redis() as (url, _):
        assert asyncio.run(work(url)) == (1, [1, 2])


def test_two_replicas_share_sessions():
    """What one process creates another one sees at once, under the same ids."""

    async def work(url):
        async with await open_store(url) as one, await open_store(url) as two:
            session = await one.sessions.create("ann")
            assert await two.sessions.get("ann", session.id) == session
            ids = {(await store.snapshots.put("ann", stream(b"same"))).id for store in (one, two)}
            await two.sessions.delete("ann", session.id)
            return len(ids), await one.snapshots.usage("ann")

    with started_redis() as (url, _):
        assert asyncio.run(work(url)) == (1, Usage(4, 1))


def test_states_may_lie_elsewhere_than_their_catalogue(tmp_path):
    """With records in Redis and blobs in a folder both are found again, and lost records stop the next start."""

    async def work(url):
        async with await open_store(url, blobs=str(tmp_path)) as store:
            state = await store.snapshots.put("ann", stream(b"state"))
        async with await open_store(url, blobs=str(tmp_path)) as store:
            assert b"".join([piece async for piece in store.snapshots.get("ann", state.id)]) == b"state"
            assert await store.upkeep.audit() == []
            await store._place.records._client.flushall()
        with pytest.raises(StorageError, match="holds 1 states, and their catalogue is not there"):
            await open_store(url, blobs=str(tmp_path))

    with started_redis() as (url, _):
        asyncio.run(work(url))
    assert [path.read_bytes() for path in tmp_path.glob("snapshots/*/*")] == [b"state"]


def test_without_the_library_one_is_told_what_to_install(monkeypatch):
    """An address of Redis without redis-py says which extra gives it, and shows no password."""
    whole = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("redis"):
            raise ImportError(name)
        return whole(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    for name in [name for name in sys.modules if name == "redis" or name.startswith("redis.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(MissingExtraError, match=r"pip install -e '\.\[redis\]'") as refused:
        asyncio.run(open_store("redis://user:secret@host:6379"))
    assert "secret" not in str(refused.value)


def test_an_address_that_is_none_is_refused():
    """An address that redis-py does not understand is a StorageError."""
    with pytest.raises(StorageError, match="not one of Redis"):
        asyncio.run(open_store("redis://host:port-that-is-none"))
