"""The ledger of stored states, which keeps references to snapshots consistent; and the place that holds them."""

import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar, final

from dist_attn.errors import StorageError, UnknownStateError
from dist_attn.store.entries import PrefixRecord, SessionRecord, SnapshotRecord, StoreLimits, Usage
from dist_attn.store.ledger import Ledger, change, changed, name_in, salted, secret_of
from dist_attn.store.ports import Blobs, BufferedTransaction, Records

TOUCH_S = 60.0  # used again within this time, a prefix keeps its place
T = TypeVar("T")


@final
class StateLedger(Ledger):
    """The ledger of sessions, prefixes and snapshots, whose changes keep references consistent."""

    def __init__(self, transaction: BufferedTransaction, limits: StoreLimits, now: float) -> None:
        super().__init__(transaction, now)
        self.limits = limits

    async def used(self, tenant: str = "") -> Usage:
        """The amounts kept for a caller; without a name, for all."""
        return await self.usage(Usage, tenant)

    # ---- snapshots -----------------------------------------------------------------------------

    async def owned_snapshot(self, tenant: str, name: str) -> SnapshotRecord:
        """The record of a caller's snapshot.

        Raises: UnknownStateError when it is not there, or is another caller's, which sounds the same.
        """
        record = await self.find(SnapshotRecord, name)
        if record is None or record.tenant != tenant:
            raise UnknownStateError(f"there is no snapshot {name!r}; it was deleted, has expired, or never was")
        return record

    async def refer(self, tenant: str, name: str) -> None:
        """Count one more reference to a caller's snapshot.

        Raises: UnknownStateError.
        """
        before = await self.owned_snapshot(tenant, name)
        await self.save(name, changed(before, references=before.references + 1), before)

    async def release(self, name: str) -> None:
        """Count one reference to a snapshot less; it goes at once where that was the last one and nothing holds it."""
        before = await self.find(SnapshotRecord, name)
        if before is None:
            return
        if before.references == 1 and before.held_until <= self.now:
            await self.drop_snapshot(name, before)
        else:
            await self.save(name, changed(before, references=before.references - 1), before)

    async def drop_snapshot(self, name: str, record: SnapshotRecord) -> None:
        """Forget a snapshot that nobody refers to."""
        await self.forget(name, record)
        self.dropped.append(record.blob)

    async def drop_loose(
        self, limit: int, after: str = "", may_go: Callable[[SnapshotRecord], bool] = lambda _: True
    ) -> tuple[int, str]:
        """Look at `limit` snapshots behind the key `after` that nobody refers to or holds; forget those that may go.

        Returns how many went, and the key behind which there may be more, "" at the end.
        """
        keys, last = await self.due("loose/", after, limit)
        names = [name_in(key) for key in keys]
        dropped = 0
        for name, record in zip(names, await self.find_all(SnapshotRecord, names), strict=True):
            if record is None:
                raise _listed("snapshot", name)
            if may_go(record):
                await self.drop_snapshot(name, record)
                dropped += 1
        return dropped, last

    # ---- sessions ------------------------------------------------------------------------------

    async def owned_session(self, tenant: str, name: str) -> SessionRecord:
        """The record of a caller's session.

        Raises: UnknownStateError when it is not there, has expired, or is another caller's, which sounds the same.
        """
        record = await self.find(SessionRecord, name)
        if record is None or record.tenant != tenant or record.expires_at <= self.now:
            raise UnknownStateError(f"there is no session {name!r}; it was deleted, has expired, or never was")
        return record

    async def drop_session(self, name: str, record: SessionRecord) -> None:
        """Forget a session and what it refers to."""
        for point in record.checkpoints:
            await self.release(point.snapshot)
        await self.forget(name, record)

    async def drop_expired(self, limit: int, after: str, may_go: Callable[[SessionRecord], bool]) -> tuple[int, str]:
        """Look at `limit` sessions behind the key `after` that have expired; end those that may go: as `drop_loose`."""
        keys, last = await self.due("expiry/", after, limit)
        names = [name_in(key) for key in keys]
        ended = 0
        for name, record in zip(names, await self.find_all(SessionRecord, names), strict=True):
            if record is None:
                raise _listed("session", name)
            if may_go(record):
                await self.drop_session(name, record)
                ended += 1
        return ended, last

    # ---- prefixes ------------------------------------------------------------------------------

    async def add_prefix(self, key: str, record: PrefixRecord) -> None:
        """Enter a prefix that is not there yet; the caller's least used one goes where there are too many.

        Raises: UnknownStateError when its snapshot is not there.
        """
        await self.refer(record.tenant, record.snapshot)
        await self.save(key, record)
        while (await self.used(record.tenant)).prefixes > self.limits.tenant_prefixes:
            ((oldest, _),) = await self.transaction.scan(f"tenant-lru/{record.tenant}/", 1)
            await self.drop_prefix(name_in(oldest))

    async def touch_prefix(self, key: str, record: PrefixRecord) -> None:
        """Note that a prefix was used now."""
        if self.now - record.used_at >= TOUCH_S:
            await self.save(key, changed(record, used_at=self.now), record)

    async def drop_prefix(self, key: str) -> None:
        """Forget a prefix."""
        record = await self.find(PrefixRecord, key)
        if record is not None:
            await self.forget(key, record)
            await self.release(record.snapshot)


def _listed(what: str, name: str) -> StorageError:
    return StorageError(f"the catalogue lists {what} {name}, which it does not have; it is damaged")


@dataclass(frozen=True)
class Place:
    """Records and blobs, the secret that salts every id, the time in seconds since 1970, and a monotonic clock."""

    records: Records
    blobs: Blobs
    limits: StoreLimits
    secret: bytes = field(repr=False)
    clock: Callable[[], float] = time.time
    monotonic: Callable[[], float] = time.monotonic

    @staticmethod
    async def open(
        records: Records,
        blobs: Blobs,
        limits: StoreLimits,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> "Place":
        """Open the place, with the secret that was drawn when it was first opened.

        Raises: StorageError.
        """
        return Place(records, blobs, limits, await secret_of(records), clock, monotonic)

    def tenant(self, name: str) -> str:
        """Hash a caller's name with salt, as it stands in keys: so names are neither shown nor misread."""
        return self.salted("tenant", name.encode())[:32]

    def salted(self, use: str, *parts: bytes) -> str:
        """HMAC-SHA256 of some bytes in hex; no two uses, and no two ways to cut the bytes, have equal ones."""
        return salted(self.secret, b"".join(len(part).to_bytes(8, "little") + part for part in (use.encode(), *parts)))

    async def change(self, work: Callable[[StateLedger], Awaitable[T]]) -> T:
        """Run work on the ledger in one transaction, and delete the blobs that it has dropped.

        Raises: StorageError; whatever `work` raises, and then nothing changes.
        """
        result, dropped = await change(
            self.records, lambda transaction: StateLedger(transaction, self.limits, self.clock()), work
        )
        for blob in dropped:
            # The change is made; bytes that stay are swept away later.
            with contextlib.suppress(StorageError):
                await self.blobs.delete(blob)
        return result
