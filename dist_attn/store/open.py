"""Opening a store of states: what an address names, and the store as a whole.

An address is a folder, `redis://HOST:PORT/DB` (rediss, unix), or `memory:`; of blobs alone also one of an object store,
`s3://BUCKET/FOLDER` (gs, az). This is the one place that knows all kinds. Records and blobs have an address each, which
may be the same.
"""

import contextlib
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Literal, Self, final

from dist_attn.errors import CatalogueDamagedError, ConfigError, StorageError
from dist_attn.store import objects
from dist_attn.store.disk import CATALOGUE, SNAPSHOTS, DiskBlobs, DiskRecords, has_records
from dist_attn.store.entries import StoreLimits, Usage
from dist_attn.store.ledger import salted, secret_of, unknown_beside
from dist_attn.store.memory import MemoryBlobs, MemoryRecords
from dist_attn.store.ports import Blobs, Records
from dist_attn.store.prefixes import Prefixes
from dist_attn.store.redis import RedisBlobs, RedisRecords, connect
from dist_attn.store.sessions import Sessions
from dist_attn.store.snapshots import Snapshots
from dist_attn.store.state_ledger import Place
from dist_attn.store.upkeep import Upkeep

NAMESPACE = "dist-attn"


def is_redis(address: str) -> bool:
    """Return whether an address is one of Redis."""
    return address.startswith(("redis://", "rediss://", "unix://"))


def kind_of(address: str) -> Literal["folder", "redis", "memory", "objects"]:
    """Raises: ConfigError for an address of no such kind."""
    if address == "memory:":
        return "memory"
    if is_redis(address):
        return "redis"
    if address.startswith(objects.SCHEMES):
        return "objects"
    if "://" in address or not address:
        needed = "a folder, redis://HOST:PORT, or memory:; for states alone also s3://BUCKET (gs, az)"
        raise ConfigError(f"{address!r} was given to keep data at; needed is {needed}")
    return "folder"


def check_place(address: str) -> None:
    """Refuse an address that could not be opened anyhow; nothing is opened.

    Raises: ConfigError for one of no known kind, MissingExtraError without the library that it needs, StorageError
        for one that redis-py does not understand.
    """
    match kind_of(address):
        case "redis":
            connect(address)
        case "objects":
            objects.connect(address)


def folder_of(address: str) -> Path | None:
    """The folder that an address names; None where it names none. Raises: ConfigError, as `kind_of`."""
    return Path(address) if kind_of(address) == "folder" else None


async def open_records(address: str, file: str = CATALOGUE, namespace: str = NAMESPACE) -> Records:
    """Open the records at an address: in this file of a folder, or under this name in Redis.

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
        case "objects":
            raise ConfigError(f"{address} can have states alone: give it as store.blobs, and another store.address")


def open_blobs(address: str) -> Blobs:
    """Open the blobs of states at an address. Raises: as `open_records`."""
    match kind_of(address):
        case "folder":
            return DiskBlobs(Path(address) / SNAPSHOTS)
        case "redis":
            return RedisBlobs(connect(address), NAMESPACE)
        case "memory":
            return MemoryBlobs()
        case "objects":
            return objects.ObjectBlobs(objects.connect(address))


def lost_catalogue(place: object, contents: str, name: str = "", way_back: str = "") -> CatalogueDamagedError:
    """Make the refusal to begin a new catalogue beside bytes, which it would take for unneeded ones."""
    return CatalogueDamagedError(
        f"{place} holds {contents}, and their catalogue{name and f' {name}'} is not there or empty; put a backup of it "
        f"in its place{way_back}; to begin without them move the folder away"
    )


@final
class StateStore:
    """A store as a whole; opened by `open_store`, closed by `close` or as a context."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self.limits = place.limits
        self.place = ""
        """The name of the place of the states; "" where a full disk could not take one."""
        self.upkeep = Upkeep(place)
        self.snapshots = Snapshots(place, self.upkeep)
        self.sessions = Sessions(place)
        self.prefixes = Prefixes(place)

    @staticmethod
    async def over(
        records: Records,
        blobs: Blobs,
        limits: StoreLimits | None = None,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> "StateStore":
        """Open a store over any records and blobs, and put it in order first.

        Raises: StorageError.
        """
        store = StateStore(await Place.open(records, blobs, limits or StoreLimits(), clock, monotonic))
        await store.upkeep.repair()
        return store

    async def totals(self) -> Usage:
        """The amounts kept for all callers together.

        Raises: StorageError.
        """
        return await self._place.change(lambda ledger: ledger.used())

    async def close(self) -> None:
        """Let go of the place; all that was kept stays."""
        await self._place.blobs.close()
        await self._place.records.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


async def open_store(address: str, limits: StoreLimits | None = None, *, blobs: str = "") -> StateStore:
    """Open the store whose records are at an address and whose states are at `blobs`, or there too.

    Each is a folder, `redis://HOST:PORT/DB` (rediss, unix), or `memory:`.

    Raises: StorageError when it cannot be opened, or holds states without their catalogue; MissingExtraError when
        redis-py is needed and not there; ConfigError for an address of another kind, or of other records' states.
    """
    states = open_blobs(blobs or address)

    async def count() -> int:
        number = 0
        async for _ in states.names():
            number += 1
        return number

    async with AsyncExitStack() as opened:
        opened.push_async_callback(states.close)
        # Before SQLite sees it, and makes one: a new catalogue would take the states for bytes that nobody needs.
        if kind_of(address) == "folder" and not has_records(Path(address) / CATALOGUE) and (number := await count()):
            raise _without_catalogue(address, blobs, number)
        records = await open_records(address)
        opened.push_async_callback(records.close)
        if number := await unknown_beside(records, count):
            raise _without_catalogue(address, blobs, number)
        own = salted(await secret_of(records), b"owner")
        if await states.owner(own) != own:  # upkeep would delete what these records do not know
            words = (
                f"{blobs.rpartition('@')[2]} has the states of other records than those at {address.rpartition('@')[2]}"
            )
            raise ConfigError(f"{words}: give each set of records a folder of its own as store.blobs")
        store = await StateStore.over(records, states, limits)
        with contextlib.suppress(StorageError):
            store.place = await states.place()
        opened.pop_all()
    return store


def _without_catalogue(address: str, blobs: str, number: int) -> CatalogueDamagedError:
    place = (blobs or address).rpartition("@")[2]  # no password
    if kind_of(address) != "folder":
        return lost_catalogue(place, f"{number} states")
    rebuilt = f", or run `dist-attn state repair {address}`, which makes a new one from the states"
    together = blobs in ("", address)
    return lost_catalogue(place, f"{number} states", CATALOGUE, rebuilt if together else "")
