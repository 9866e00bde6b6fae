"""A store of states as a whole: its snapshots, sessions and prefixes, and what keeps them in order."""

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self, final

from dist_attn.store.blobs import Blobs
from dist_attn.store.entries import StoreLimits, Usage
from dist_attn.store.place import Place
from dist_attn.store.prefixes import Prefixes
from dist_attn.store.records import Records
from dist_attn.store.sessions import Sessions
from dist_attn.store.snapshots import Snapshots
from dist_attn.store.upkeep import Upkeep

__all__ = ["StateStore"]


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
        return await self._place.change(lambda ledger: ledger.usage())

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
