"""A store of states as a whole: its snapshots, sessions and prefixes, and what keeps them in order."""

import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Self, final

from dist_attn.errors import StorageError
from dist_attn.store.blobs import Blobs
from dist_attn.store.disk import CATALOGUE, has_records
from dist_attn.store.entries import StoreLimits, Usage
from dist_attn.store.ledger import unknown_beside
from dist_attn.store.open import kind_of, lost_catalogue, open_blobs, open_records
from dist_attn.store.place import Place
from dist_attn.store.prefixes import Prefixes
from dist_attn.store.records import Records
from dist_attn.store.sessions import Sessions
from dist_attn.store.snapshots import Snapshots
from dist_attn.store.upkeep import Upkeep


@final
class StateStore:
    """One store; opened by `open_store`, closed by `close` or as a context."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self.limits = place.limits
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
        """A store over any place, put in order first.

        Raises: StorageError.
        """
        store = StateStore(await Place.open(records, blobs, limits or StoreLimits(), clock, monotonic))
        await store.upkeep.repair()
        return store

    async def totals(self) -> Usage:
        """How much is kept for all callers together.

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


async def open_store(
    address: str, limits: StoreLimits | None = None, *, blobs: str = "", clock: Callable[[], float] = time.time
) -> StateStore:
    """The store whose records are at an address and whose states are at `blobs`, or there too.

    Each is a folder, `redis://HOST:PORT/DB` (rediss, unix), or `memory:`.

    Raises: StorageError when it cannot be opened, or holds states without their catalogue; MissingExtraError when
        redis-py is needed and not there; ConfigError for an address of another kind.
    """
    states = open_blobs(blobs or address)

    async def count() -> int:
        return len([name async for name in states.names()])

    async with AsyncExitStack() as opened:
        opened.push_async_callback(states.close)
        # Before SQLite sees it, and makes one: a new catalogue would take the states for bytes that nobody needs.
        if kind_of(address) == "folder" and not has_records(Path(address) / CATALOGUE) and (number := await count()):
            raise _without_catalogue(address, blobs, number)
        records = await open_records(address)
        opened.push_async_callback(records.close)
        if number := await unknown_beside(records, count):
            raise _without_catalogue(address, blobs, number)
        store = await StateStore.over(records, states, limits, clock)
        opened.pop_all()
    return store


def _without_catalogue(address: str, blobs: str, number: int) -> StorageError:
    place = (blobs or address).rpartition("@")[2]  # no password
    if kind_of(address) != "folder":
        return lost_catalogue(place, f"{number} states")
    rebuilt = f", or run `dist-attn state repair {address}`, which makes a new one from the states"
    together = blobs in ("", address)
    return lost_catalogue(place, f"{number} states", CATALOGUE, rebuilt if together else "")
