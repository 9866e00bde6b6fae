"""The books of one transaction: who refers to which snapshot, and how much each caller has."""

from collections.abc import Callable
from typing import final

from dist_attn.errors import UnknownStateError
from dist_attn.store.entries import SessionRecord, SnapshotRecord, StoreLimits, Usage, changed, decode, encode, moment
from dist_attn.store.records import BufferedTransaction

__all__ = ["Ledger"]


@final
class Ledger:
    """Reads and changes records so that references, indices and sums always agree. Time is in seconds since 1970."""

    def __init__(self, transaction: BufferedTransaction, limits: StoreLimits, now: float) -> None:
        self.transaction = transaction
        self.limits = limits
        self.now = now
        self.dropped: list[str] = []
        """Blobs to delete once the transaction is committed."""

    # ---- sums ----------------------------------------------------------------------------------

    async def usage(self, tenant: str = "") -> Usage:
        """What a caller has; without a name, what all have."""
        value = await self.transaction.get(f"usage/{tenant}" if tenant else "total")
        return Usage() if value is None else decode(value, Usage)

    async def count(
        self, tenant: str, *, size: int = 0, snapshots: int = 0, sessions: int = 0, prefixes: int = 0
    ) -> None:
        """Add to the sums of a caller and of all."""
        for name, key in ((tenant, f"usage/{tenant}"), ("", "total")):
            usage = await self.usage(name)
            usage = usage.plus(size=size, snapshots=snapshots, sessions=sessions, prefixes=prefixes)
            if usage == Usage():
                self.transaction.delete(key)
            else:
                self.transaction.put(key, encode(usage))

    # ---- snapshots -----------------------------------------------------------------------------

    async def snapshot(self, name: str) -> SnapshotRecord | None:
        """The record of a snapshot."""
        value = await self.transaction.get(f"snapshot/{name}")
        return None if value is None else decode(value, SnapshotRecord)

    async def owned_snapshot(self, tenant: str, name: str) -> SnapshotRecord:
        """The record of a caller's snapshot.

        Raises: UnknownStateError when it is not there, or is somebody else's, which sounds the same.
        """
        record = await self.snapshot(name)
        if record is None or record.tenant != tenant:
            raise UnknownStateError(f"there is no snapshot {name!r}; it was deleted, has expired, or never was")
        return record

    def save_snapshot(self, name: str, record: SnapshotRecord, before: SnapshotRecord | None) -> None:
        """Write a record, and keep the list of those that nobody refers to."""
        if before is not None and not before.references:
            self.transaction.delete(_loose(name, before))
        if not record.references:
            self.transaction.put(_loose(name, record), b"")
        self.transaction.put(f"snapshot/{name}", encode(record))

    async def refer(self, tenant: str, name: str) -> None:
        """One more refers to a caller's snapshot.

        Raises: UnknownStateError.
        """
        before = await self.owned_snapshot(tenant, name)
        self.save_snapshot(name, changed(before, references=before.references + 1), before)

    async def release(self, name: str) -> None:
        """One fewer refers to a snapshot; it goes at once where that was the last one and nothing holds it."""
        before = await self.snapshot(name)
        if before is None:
            return
        if before.references == 1 and before.held_until <= self.now:
            await self.drop_snapshot(name, before)
        else:
            self.save_snapshot(name, changed(before, references=before.references - 1), before)

    async def drop_snapshot(self, name: str, record: SnapshotRecord) -> None:
        """Forget a snapshot that nobody refers to."""
        self.transaction.delete(_loose(name, record))
        self.transaction.delete(f"snapshot/{name}")
        await self.count(record.tenant, size=-record.size, snapshots=-1)
        self.dropped.append(record.blob)

    async def drop_loose(
        self, limit: int, after: str = "", may_go: Callable[[SnapshotRecord], bool] = lambda _: True
    ) -> tuple[int, str]:
        """Look at `limit` snapshots behind the key `after` that nobody refers to or holds; forget those that may go.

        How many went, and behind which key there may be more, "" at the end.
        """
        dropped, last = 0, ""
        for key, _ in await self.transaction.scan("loose/", limit, after):
            _, time, name = key.split("/")
            if time > moment(self.now):
                return dropped, ""
            record, last = await self.snapshot(name), key
            assert record is not None
            if may_go(record):
                await self.drop_snapshot(name, record)
                dropped += 1
        return dropped, last

    # ---- sessions ------------------------------------------------------------------------------

    async def session(self, name: str) -> SessionRecord | None:
        """The record of a session."""
        value = await self.transaction.get(f"session/{name}")
        return None if value is None else decode(value, SessionRecord)

    async def owned_session(self, tenant: str, name: str) -> SessionRecord:
        """The record of a caller's session.

        Raises: UnknownStateError when it is not there, has expired, or is somebody else's, which sounds the same.
        """
        record = await self.session(name)
        if record is None or record.tenant != tenant or record.expires_at <= self.now:
            raise UnknownStateError(f"there is no session {name!r}; it was deleted, has expired, or never was")
        return record

    def save_session(self, name: str, record: SessionRecord, before: SessionRecord | None) -> None:
        """Write a record, and keep the list of when sessions end."""
        if before is not None and before.expires_at != record.expires_at:
            self.transaction.delete(_expiry(name, before))
        self.transaction.put(_expiry(name, record), b"")
        self.transaction.put(f"session/{name}", encode(record))

    async def drop_session(self, name: str, record: SessionRecord) -> None:
        """Forget a session and what it refers to."""
        for point in record.checkpoints:
            await self.release(point.snapshot)
        self.transaction.delete(_expiry(name, record))
        self.transaction.delete(f"owned/{record.tenant}/{name}")
        self.transaction.delete(f"session/{name}")
        await self.count(record.tenant, sessions=-1)


def _loose(name: str, record: SnapshotRecord) -> str:
    return f"loose/{moment(record.held_until)}/{name}"


def _expiry(name: str, record: SessionRecord) -> str:
    return f"expiry/{moment(record.expires_at)}/{name}"
