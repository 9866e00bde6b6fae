"""States in an object store, beyond what all stores promise: what opens one, and what is left of a write that fails."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dist_attn.errors import ConfigError, StorageError
from dist_attn.store import objects
from dist_attn.store.open import open_blobs, open_records, open_store
from tests.support.stores import kept, read, stream

pytest.importorskip("obstore", reason="needs obstore: pip install -e '.[obstore]'")


def test_states_outlive_a_store_that_is_closed(tmp_path: Path) -> None:
    """Opened again, over a folder with the records, it has the same name and states; without these it is refused."""
    bucket = f"file://{tmp_path / 'bucket'}"
    (tmp_path / "bucket").mkdir()

    async def work() -> None:
        async with await open_store(str(tmp_path / "records"), blobs=bucket) as store:
            name, place = await kept(store, "ann", b"bytes"), store.place
        async with await open_store(str(tmp_path / "records"), blobs=bucket) as store:
            assert await read(store, "ann", name) == b"bytes" and store.place == place != ""
        with pytest.raises(StorageError, match="holds 1 states"):
            await open_store(str(tmp_path / "others"), blobs=bucket)
        async with await open_store(str(tmp_path / "others")):  # begun elsewhere, they do not know these states either
            pass
        with pytest.raises(ConfigError, match=r"has the states of other records than those at .*others: give each"):
            await open_store(str(tmp_path / "others"), blobs=bucket)

    asyncio.run(work())


def test_a_write_that_fails_leaves_nothing_and_one_that_is_repeated_is_safe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one part or in many, also where its task is cancelled; a name that is written again has the same bytes."""
    monkeypatch.setattr(objects, "PART_BYTES", 1000)
    blobs = open_blobs(f"file://{tmp_path}")

    async def breaks(size: int, cancels: bool) -> AsyncIterator[bytes]:
        yield bytes(size)
        if cancels:
            await asyncio.sleep(3600)
        raise ZeroDivisionError

    async def work() -> None:
        for size in (10, 5000):
            with pytest.raises(ZeroDivisionError):
                await blobs.write("a", breaks(size, False))
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(blobs.write("a", breaks(size, True)), 0.05)
        assert [name async for name in blobs.names()] == []
        (tmp_path / "snapshots" / "of somebody").mkdir(parents=True, exist_ok=True)
        (tmp_path / "snapshots" / "of somebody" / "a").touch()
        (tmp_path / "snapshots" / "README.txt").touch()  # neither is ours to delete
        for _ in range(2):
            await blobs.write("b", stream(bytes(9999), (1, 4000)))
        assert [name async for name in blobs.names()] == ["b"]
        assert b"".join([piece async for piece in blobs.read("b")]) == bytes(9999)

    asyncio.run(work())


def test_records_and_strange_addresses_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The words say what to give instead, and a store that does not answer is told as such."""
    with pytest.raises(ConfigError, match="give it as store"):
        asyncio.run(open_records("s3://bucket"))
    with pytest.raises(ConfigError, match="no object store that can be used"):
        open_blobs("az://container")
    for variable, value in (("ACCESS_KEY_ID", "a"), ("SECRET_ACCESS_KEY", "b"), ("ENDPOINT", "http://127.0.0.1:9")):
        monkeypatch.setenv(f"AWS_{variable}", value)
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.setattr(objects, "RETRIES", 0)
    with pytest.raises(StorageError, match="did not do as asked"):
        asyncio.run(open_blobs("s3://bucket").has("a"))
