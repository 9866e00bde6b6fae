"""What an address names: a folder, `redis://HOST:PORT/DB` (rediss, unix), or `memory:`.

This is the one place that knows all kinds. Records and blobs have an address each, which may be the same.
"""

from pathlib import Path
from typing import Literal

from dist_attn.errors import ConfigError, StorageError
from dist_attn.store.blobs import Blobs
from dist_attn.store.disk import CATALOGUE, SNAPSHOTS, DiskBlobs, DiskRecords
from dist_attn.store.memory import MemoryBlobs, MemoryRecords
from dist_attn.store.records import Records
from dist_attn.store.redis import RedisBlobs, RedisRecords, connect

NAMESPACE = "dist-attn"


def is_redis(address: str) -> bool:
    """Whether an address is one of Redis."""
    return address.startswith(("redis://", "rediss://", "unix://"))


def kind_of(address: str) -> Literal["folder", "redis", "memory"]:
    """Raises: ConfigError for an address of no such kind."""
    if address == "memory:":
        return "memory"
    if is_redis(address):
        return "redis"
    if "://" in address or not address:
        raise ConfigError(f"{address!r} was given to keep data at; needed is a folder, redis://HOST:PORT, or memory:")
    return "folder"


def folder_of(address: str) -> Path | None:
    """The folder that an address names; None where it names none. Raises: ConfigError, as `kind_of`."""
    return Path(address) if kind_of(address) == "folder" else None


async def open_records(address: str, file: str = CATALOGUE, namespace: str = NAMESPACE) -> Records:
    """The records at an address: in this file of a folder, or under this name in Redis.

    Raises: StorageError when they cannot be opened; MissingExtraError when redis-py is needed and not there;
        ConfigError for an address of no known kind.
    """
    match kind_of(address):
        case "folder":
            return await DiskRecords.open(Path(address) / file)
        case "redis":
            return RedisRecords(connect(address), namespace)
        case "memory":
            return MemoryRecords()


def open_blobs(address: str) -> Blobs:
    """The blobs of states at an address. Raises: StorageError, MissingExtraError, ConfigError, as `open_records`."""
    match kind_of(address):
        case "folder":
            return DiskBlobs(Path(address) / SNAPSHOTS)
        case "redis":
            return RedisBlobs(connect(address), NAMESPACE)
        case "memory":
            return MemoryBlobs()


def lost_catalogue(place: object, contents: str, name: str = "", way_back: str = "") -> StorageError:
    """The refusal to begin a new catalogue beside bytes, which it would take for bytes that nobody needs."""
    return StorageError(
        f"{place} holds {contents}, and their catalogue{name and f' {name}'} is not there or empty; put a backup of it "
        f"in its place{way_back}; to begin without them move the folder away"
    )
