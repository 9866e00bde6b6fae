"""The store of states for as long as the service runs: opened, kept in order beside the requests, closed."""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import final

from dist_attn.errors import StateMismatchError, StorageError, WireError
from dist_attn.settings import DataFolder
from dist_attn.store import StateStore, Usage, open_store
from dist_attn.store.disk import CATALOGUE, PLACE, SNAPSHOTS
from dist_attn.store.open import folder_of
from dist_attn.store.private import tighten
from dist_attn.wire.manifest import ModelIdentity, require_same_model
from dist_attn.wire.snapshot import header_of
from dist_attn_service.base.logs import Log, warn_of_jump
from dist_attn_service.base.settings import Settings
from dist_attn_service.base.tasks import beside, stop_tasks
from dist_attn_service.engine.watch import ELSEWHERE, EngineWatch

ROUND_SECONDS = 300.0  # a round of upkeep that takes longer is ended, and begun again at its next time
FRESH_SECONDS = 1.0
LOOK_SECONDS = 20.0  # at a start, through sessions that may be many
MOST_REVISIONS = 8  # that a line of log names
STATES = (f"{CATALOGUE}*", "catalogue.repaired.sqlite*", SNAPSHOTS, f"{PLACE}*", "aside-2*T*", "dist-attn-states-*")
JOBS = (f"{CATALOGUE}*", "files")
FILES = ("files.sqlite*", "bytes")
OURS = (*DataFolder, *STATES, *JOBS, *FILES)
STATUS_TIMEOUT_SECONDS = 1.0  # a request for the status does not wait longer for a store that is away


@final
class StoreService:
    """The open store, and the totals of what it holds."""

    def __init__(self, store: StateStore, settings: Settings, log: Log) -> None:
        self.store = store
        self._settings = settings
        self._log = log
        self._looked_at = -FRESH_SECONDS
        self._repaired_at = time.monotonic()  # the store repairs itself when it is opened
        self._totals = Usage()

    @staticmethod
    @asynccontextmanager
    async def opened(settings: Settings, log: Log) -> "AsyncIterator[StoreService]":
        """The store that the settings name, with its upkeep, until the block ends.

        Raises: StorageError, ConfigError or MissingExtraError when it cannot be opened.
        """
        await beside(None, _close_to_others, settings, log)
        address, blobs = settings.store_address, settings.store.blobs
        async with await open_store(address, settings.store_limits, blobs=blobs) as store:
            service = StoreService(store, settings, log)
            task = asyncio.create_task(service.upkeep(), name="store-upkeep")
            try:
                yield service
            finally:
                await stop_tasks(task)

    async def warn_of_other_models(self, watch: EngineWatch) -> None:
        """Wait until the engine is ready, and log how many sessions cannot go on with its model."""
        while (status := watch.health().status) is None or not status.ready:  # noqa: ASYNC110 - others make it so
            await asyncio.sleep(FRESH_SECONDS)
        if status.manifest is None:
            return
        if watch.keeps_states_elsewhere(status):
            self._log.error(f"the engine {ELSEWHERE}")
        served, looked_at, theirs = status.manifest.model, 0, Counter[str]()
        with contextlib.suppress(StorageError, TimeoutError):
            async with asyncio.timeout(LOOK_SECONDS), contextlib.aclosing(self.store.snapshots.of_sessions()) as newest:
                async for beginning in newest:
                    looked_at += 1
                    with contextlib.suppress(WireError):  # damaged: a request that reads it gets an error
                        theirs.update(_other_revisions(header_of(beginning).manifest.model, served))
        if theirs:
            self._log.warning(
                "sessions of another model cannot go on; serve its folder until they have ended "
                "(docs/how-to/operate.md)",
                sessions=theirs.total(),
                of=looked_at,
                revision=served.revision,
                revisions=dict(theirs.most_common(MOST_REVISIONS)),
            )

    async def totals(self) -> Usage:
        """The usage of all callers, at most a second old; the last one known while the store does not answer."""
        if time.monotonic() - self._looked_at >= FRESH_SECONDS:
            self._looked_at = time.monotonic()
            with contextlib.suppress(StorageError, TimeoutError):
                async with asyncio.timeout(STATUS_TIMEOUT_SECONDS):
                    self._totals = await self.store.totals()
        return self._totals

    @property
    def known_totals(self) -> Usage:
        """The last result of `totals`."""
        return self._totals

    async def upkeep(self) -> None:
        """Keep the store in order until cancelled: a round at a time, each with a deadline."""
        while True:
            await asyncio.sleep(self._settings.store.upkeep_s)
            try:
                async with asyncio.timeout(ROUND_SECONDS):
                    await self.round()
            except (StorageError, TimeoutError) as error:
                self._log.warning("upkeep of the store failed", error=str(error) or "it took too long")

    async def round(self) -> None:
        """Remove what has expired, what is over the store's bounds and, each `orphan_s`, bytes that nothing refers to.

        Raises: StorageError.
        """
        upkeep, orphan_s = self.store.upkeep, self._settings.store.orphan_s
        removed = await upkeep.collect()
        warn_of_jump(self._log, upkeep.grace, "state or session")
        if not await upkeep.make_room(0):
            self._log.warning("the store holds more than its limit, and all of it is in use")
        orphans = 0
        if time.monotonic() - self._repaired_at >= orphan_s:
            self._repaired_at = time.monotonic()
            orphans = (await upkeep.repair()).orphans
        if removed.sessions or removed.snapshots or orphans:
            self._log.info(
                "upkeep of the store", sessions=removed.sessions, snapshots=removed.snapshots, orphans=orphans
            )


def _other_revisions(stored: ModelIdentity, served: ModelIdentity) -> list[str]:
    """The revision of a stored model, in a list, if its states cannot go on with the served one; else an empty list."""
    try:
        require_same_model(stored, served)
    except StateMismatchError:
        return [stored.revision]
    return []


def _close_to_others(settings: Settings, log: Log) -> None:
    """Close the folders that an earlier version, or their owner, left open to other users of this machine."""
    places = (settings.store_address, settings.store.blobs or settings.store_address)
    for folder, inside in (
        (settings.data_dir, ()),
        *((folder_of(address), STATES) for address in dict.fromkeys(places)),
        (settings.data_dir / DataFolder.JOBS, JOBS),
        (settings.files_folder, FILES),
    ):
        closed = None if folder is None else tighten(folder, OURS, inside)
        if closed:
            log.warning("a folder was open to other users of this machine; now its owner alone may", folder=str(folder))
        elif closed is not None:
            log.warning(
                "a folder of this service is open to other users of this machine, and is left so, as other things are "
                "in it; give the service a folder of its own, or run chmod go= on this one",
                folder=str(folder),
            )
