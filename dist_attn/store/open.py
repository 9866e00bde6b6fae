"""Which store an address names."""

import time
from collections.abc import Callable
from pathlib import Path

from dist_attn.errors import ConfigError
from dist_attn.store.disk import DiskBlobs, DiskRecords
from dist_attn.store.entries import StoreLimits
from dist_attn.store.memory import MemoryBlobs, MemoryRecords
from dist_attn.store.records import Records
from dist_attn.store.redis import RedisBlobs, RedisRecords, connect
from dist_attn.store.state_store import StateStore

__all__ = ["open_records", "open_store"]

NAMESPACE = "dist-attn"
REDIS_SCHEMES = ("redis://", "rediss://", "unix://")


async def open_store(
    address: str, limits: StoreLimits | None = None, *, clock: Callable[[], float] = time.time
) -> StateStore:
    """The store at an address: a folder, `redis://HOST:PORT/DB` (rediss, unix), or `memory:`.

    Raises: StorageError when it cannot be opened, MissingExtraError when redis-py is needed and not there, ConfigError
        for an address of another kind.
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
    if "://" in address or not address:
        raise ConfigError(f"states were to be kept at {address!r}; needed is a folder, redis://HOST:PORT, or memory:")
    folder = Path(address)
    catalogue = await DiskRecords.open(folder / "catalogue.sqlite")
    try:
        return await StateStore.over(catalogue, DiskBlobs(folder / "snapshots"), limits, clock)
    except BaseException:
        await catalogue.close()
        raise


async def open_records(address: str, name: str) -> Records:
    """Records alone, of another use than states: in the file `NAME.sqlite` of a folder, or under a name in Redis.

    Raises: as `open_store`.
    """
    if address.startswith(REDIS_SCHEMES):
        return RedisRecords(connect(address), f"{NAMESPACE}-{name}")
    if "://" in address or not address:
        raise ConfigError(f"the catalogue was to be kept at {address!r}; needed is a folder or redis://HOST:PORT")
    return await DiskRecords.open(Path(address) / f"{name}.sqlite")
