"""Which store an address names."""

import time
from collections.abc import Callable
from pathlib import Path

from dist_attn.errors import ConfigError, StorageError
from dist_attn.store.disk import CATALOGUE, SNAPSHOTS, DiskBlobs, DiskRecords, has_records
from dist_attn.store.entries import StoreLimits
from dist_attn.store.memory import MemoryBlobs, MemoryRecords
from dist_attn.store.records import Records
from dist_attn.store.redis import RedisBlobs, RedisRecords, connect
from dist_attn.store.state_store import StateStore

__all__ = ["folder_of", "open_records", "open_store"]

NAMESPACE = "dist-attn"
REDIS_SCHEMES = ("redis://", "rediss://", "unix://")


async def open_store(
    address: str, limits: StoreLimits | None = None, *, clock: Callable[[], float] = time.time
) -> StateStore:
    """The store at an address: a folder, `redis://HOST:PORT/DB` (rediss, unix), or `memory:`.

    Raises: StorageError when it cannot be opened, or holds states without their catalogue; MissingExtraError when
        redis-py is needed and not there; ConfigError for an address of another kind.
    """
    if address == "memory:":
        return await StateStore.over(MemoryRecords(), MemoryBlobs(), limits, clock)
    if address.startswith(REDIS_SCHEMES):
        client = connect(address)
        records = RedisRecords(client, NAMESPACE)
        try:
            return await StateStore.over(records, RedisBlobs(client, NAMESPACE), limits, clock)
        except BaseException:
            await records.close()
            raise
    folder = folder_of(address)
    if folder is None:
        raise ConfigError(f"states were to be kept at {address!r}; needed is a folder, redis://HOST:PORT, or memory:")
    blobs = DiskBlobs(folder / SNAPSHOTS)
    # Before SQLite sees it: a new catalogue would take the states for bytes that nobody needs.
    if not has_records(folder / CATALOGUE):
        count = len([name async for name in blobs.names()])
        if count:
            raise StorageError(
                f"{folder} holds {count} states, and their catalogue {CATALOGUE} is not there or empty; put a backup "
                f"of it in its place, or run `dist-attn state repair {folder}`, which makes a new one from the states; "
                "to begin without them move the folder away"
            )
    catalogue = await DiskRecords.open(folder / CATALOGUE)
    try:
        return await StateStore.over(catalogue, blobs, limits, clock)
    except BaseException:
        await catalogue.close()
        raise


def folder_of(address: str) -> Path | None:
    """The folder that an address of a store names; None where it names none."""
    return None if "://" in address or address in ("", "memory:") else Path(address)


async def open_records(address: str, name: str) -> Records:
    """Records alone, of another use than states: in the file `NAME.sqlite` of a folder, or under a name in Redis.

    Raises: as `open_store`.
    """
    if address.startswith(REDIS_SCHEMES):
        return RedisRecords(connect(address), f"{NAMESPACE}-{name}")
    if "://" in address or not address:
        raise ConfigError(f"the catalogue was to be kept at {address!r}; needed is a folder or redis://HOST:PORT")
    return await DiskRecords.open(Path(address) / f"{name}.sqlite")
