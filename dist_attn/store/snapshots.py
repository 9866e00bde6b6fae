"""Snapshots by their content: put, get, stat, pin, unpin and delete, as streams."""

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator
from functools import partial
from typing import cast, final

from dist_attn.errors import ConflictError, QuotaError, StateDamagedError, StorageError
from dist_attn.store.entries import SessionRecord, SnapshotInfo, SnapshotRecord, Usage
from dist_attn.store.ledger import changed, name_in
from dist_attn.store.ports import born_at, new_name, within
from dist_attn.store.state_ledger import Place, StateLedger
from dist_attn.store.upkeep import Upkeep

BATCH = 64  # sessions of one transaction


@final
class Snapshots:
    """The snapshots of a place. Equal bytes of one caller are kept once; those of two callers have different ids."""

    def __init__(self, place: Place, upkeep: Upkeep) -> None:
        self._place = place
        self._upkeep = upkeep
        self._writers = asyncio.Semaphore(place.limits.writers)

    async def put(self, tenant: str, pieces: AsyncIterable[bytes], *, spare: bool = False) -> SnapshotInfo:
        """Keep a snapshot, for `hold_s` at least; after that for as long as something refers to it.

        With `spare` it is one that can be done without: no checkpoint of a session goes for it.

        Memory: a piece. Raises: QuotaError when the caller has no room, StorageError when the store has none or it
        cannot be written; whatever `pieces` raises. Nothing is kept then.
        """
        place, tag = self._place, self._place.tenant(tenant)
        name, digest, size = new_name(place.clock()), hashlib.sha256(), 0

        async def measured() -> AsyncIterator[bytes]:
            nonlocal size
            async for piece in within(pieces, place.limits.snapshot_bytes):
                size += len(piece)
                digest.update(piece)
                yield piece

        async with self._writers:
            try:
                # Bytes that are older than `orphan_s` and have no record may be swept away by another process.
                async with asyncio.timeout(place.limits.orphan_s / 2):
                    await place.blobs.write(name, measured())
            except TimeoutError:
                raise StorageError(
                    f"a snapshot did not come within {place.limits.orphan_s / 2:g} s; send it faster"
                ) from None
            if not size:
                await place.blobs.delete(name)
                raise StorageError("an empty snapshot was given; needed is at least one byte")
            return await self._settle(tag, name, digest.hexdigest(), size, spare)

    async def adopt(self, tenant: str, blob: str, digest: str, size: int, *, spare: bool = False) -> SnapshotInfo:
        """Record bytes that lie in the place already as the blob of this name, as `put` would have.

        Raises: QuotaError, StorageError; the bytes are deleted then.
        """
        return await self._settle(self._place.tenant(tenant), blob, digest, size, spare)

    async def take_over(self, tenant: str, blob: str, digest: str, size: int, *, spare: bool = False) -> SnapshotInfo:
        """Adopt bytes that another process has just written.

        Raises: as `adopt`; StorageError also where they are not in this place.
        """
        place, limits = self._place, self._place.limits
        if size > limits.snapshot_bytes:
            await self.discard(blob)
            raise StorageError(
                f"a state has {size} bytes, and {limits.snapshot_bytes} is the limit of this store for one snapshot"
            )
        # Bytes that are older than `orphan_s` and have no record may be swept away by another process.
        if place.clock() - born_at(blob) > limits.orphan_s / 2 or not await place.blobs.has(blob):
            raise StorageError(
                "a state that the engine has written is not in this store; give engine and API the same "
                "store.address and store.blobs, and the same time"
            )
        return await self.adopt(tenant, blob, digest, size, spare=spare)

    async def discard(self, blob: str) -> None:
        """Delete bytes that another process has written, if any, and nobody adopts; upkeep does where this fails."""
        if blob:
            with contextlib.suppress(StorageError):
                await self._place.blobs.delete(blob)

    async def lend(self, tenant: str, name: str) -> SnapshotRecord:
        """Hold a snapshot for `hold_s`, so that another process can read its blob, by the record that is returned.

        Raises: UnknownStateError; StorageError.
        """
        try:
            return await self._hold(tenant, name, self._place.limits.hold_s)
        except StorageError:  # a full disk takes no note, and lets it be read all the same
            tag = self._place.tenant(tenant)
            return await self._place.change(lambda ledger: ledger.owned_snapshot(tag, name))

    async def _settle(self, tag: str, blob: str, digest: str, size: int, spare: bool) -> SnapshotInfo:
        """Record bytes that are written, or let go of them where they are kept already or there is no room."""
        place = self._place
        name = place.salted("snapshot", tag.encode(), bytes.fromhex(digest))
        there = await place.change(lambda ledger: ledger.find(SnapshotRecord, name))
        spoilt = "" if there is None or await self._is_sound(name, there) else there.blob

        async def enter(ledger: StateLedger) -> SnapshotInfo | StorageError:
            hold = ledger.now + place.limits.hold_s
            known = await ledger.find(SnapshotRecord, name)
            if known is not None:
                record = changed(known, held_until=max(known.held_until, hold))
                if known.blob == spoilt:  # the bytes that came now take the place of the damaged ones
                    record = changed(record, blob=blob)
                gone = spoilt if record.blob == blob else blob
                if gone not in ("", record.blob):  # entered twice, where an answer was lost: nothing goes
                    ledger.dropped.append(gone)
                await ledger.save(name, record, known)
                return record.info(name)
            if (await ledger.used(tag)).bytes + size > place.limits.tenant_bytes:
                return _over_quota(place.limits.tenant_bytes)
            total = (await ledger.used()).bytes
            if total + size > place.limits.store_bytes:
                limit = place.limits.store_bytes
                return StorageError(f"the store holds {total} of {limit} bytes and cannot take {size} more; keep less")
            record = SnapshotRecord(tag, blob, size, digest, 0, hold, ledger.now)
            await ledger.save(name, record)
            return record.info(name)

        # An exception here leaves the bytes to the next sweep: whether the record was written may be unknown.
        result = await place.change(enter)
        if isinstance(result, StorageError):
            await self._upkeep.make_room(size, tag if isinstance(result, QuotaError) else "", checkpoints=not spare)
            result = await place.change(enter)
        if isinstance(result, StorageError):
            await place.blobs.delete(blob)
            raise result
        return result

    async def get(self, tenant: str, name: str) -> AsyncIterator[bytes]:
        """Read the bytes of a snapshot, which is held meanwhile. The last piece comes once all are known to be sound.

        Raises: UnknownStateError; StorageError when it cannot be read; StateDamagedError before the last piece when its
            bytes are gone or have changed.
        """
        record = await self.lend(tenant, name)
        async for piece in self._sound_pieces(name, record):
            yield piece

    async def beginning(self, tenant: str, name: str) -> bytes:
        """Read the first piece of a snapshot's bytes, as they lie there, with its header.

        Raises: UnknownStateError; StorageError, StateDamagedError when it cannot be read.
        """
        tag = self._place.tenant(tenant)
        return await self._first_piece(await self._place.change(lambda ledger: ledger.owned_snapshot(tag, name)))

    async def of_sessions(self) -> AsyncGenerator[bytes]:
        """Read the first piece of the newest state of each session of any caller; unreadable ones are left out.

        Raises: StorageError.
        """
        after, page = "", [""]
        while page:
            page, records = await self._place.change(partial(_newest_of_sessions, after=after))
            after = page[-1] if page else ""
            for record in records:
                with contextlib.suppress(StorageError):
                    yield await self._first_piece(record)

    async def _first_piece(self, record: SnapshotRecord) -> bytes:
        async with contextlib.aclosing(cast("AsyncGenerator[bytes]", self._place.blobs.read(record.blob))) as pieces:
            return await anext(pieces, b"")

    async def check(self, tenant: str, name: str) -> None:
        """Read a snapshot to its end. Cost: a read and a SHA-256 of its bytes.

        Raises: as `get`.
        """
        async for _ in self.get(tenant, name):
            pass

    async def _sound_pieces(self, name: str, record: SnapshotRecord) -> AsyncIterator[bytes]:
        """Read the bytes of a blob, the last piece only when all are those of the record.

        Raises: StorageError; StateDamagedError.
        """
        digest, withheld = hashlib.sha256(), b""
        async for piece in self._place.blobs.read(record.blob):
            digest.update(piece)
            if withheld:
                yield withheld
            withheld = piece
        if digest.hexdigest() != record.digest:
            raise StateDamagedError(
                f"snapshot {name} is damaged: its bytes are not those that were stored; go on from another checkpoint, "
                "or read the text again into a new session"
            )
        yield withheld

    async def _is_sound(self, name: str, record: SnapshotRecord) -> bool:
        """Return whether the bytes of a snapshot are there as they were stored.

        Raises: StorageError when they cannot be read.
        """
        try:
            async for _ in self._sound_pieces(name, record):
                pass
        except StateDamagedError:
            return False
        return True

    async def stat(self, tenant: str, name: str) -> SnapshotInfo:
        """The size, digest, references and time of a snapshot.

        Raises: UnknownStateError.
        """
        tag = self._place.tenant(tenant)
        record = await self._place.change(lambda ledger: ledger.owned_snapshot(tag, name))
        return record.info(name)

    async def pin(self, tenant: str, name: str, seconds: float) -> None:
        """Keep a snapshot for `seconds`, even without references; at most the longest life of a session.

        Raises: UnknownStateError.
        """
        await self._hold(tenant, name, seconds)

    async def unpin(self, tenant: str, name: str) -> None:
        """Keep a snapshot no longer than `hold_s` from now, unless something refers to it.

        Raises: UnknownStateError.
        """
        tag = self._place.tenant(tenant)

        async def let_go(ledger: StateLedger) -> None:
            before = await ledger.owned_snapshot(tag, name)
            until = min(before.held_until, ledger.now + ledger.limits.hold_s)
            await ledger.save(name, changed(before, held_until=until), before)

        await self._place.change(let_go)

    async def _hold(self, tenant: str, name: str, seconds: float) -> SnapshotRecord:
        tag = self._place.tenant(tenant)

        async def hold(ledger: StateLedger) -> SnapshotRecord:
            before = await ledger.owned_snapshot(tag, name)
            until = ledger.now + min(seconds, ledger.limits.longest_ttl_s)
            if until <= before.held_until:
                return before
            record = changed(before, held_until=until)
            await ledger.save(name, record, before)
            return record

        return await self._place.change(hold)

    async def delete(self, tenant: str, name: str) -> None:
        """Forget a snapshot that nothing refers to, pinned or not.

        Raises: UnknownStateError; ConflictError when sessions or prefixes refer to it.
        """
        tag = self._place.tenant(tenant)

        async def drop(ledger: StateLedger) -> None:
            record = await ledger.owned_snapshot(tag, name)
            if record.references:
                raise ConflictError(
                    f"snapshot {name} is referred to {record.references} times; delete the sessions that do it first"
                )
            await ledger.drop_snapshot(name, record)

        await self._place.change(drop)

    async def usage(self, tenant: str) -> Usage:
        """The amounts kept for a caller."""
        tag = self._place.tenant(tenant)
        return await self._place.change(lambda ledger: ledger.used(tag))


def _over_quota(limit: int) -> QuotaError:
    return QuotaError(f"this caller's {limit} bytes of stored states are used up; delete sessions, or let them expire")


async def _newest_of_sessions(ledger: StateLedger, after: str) -> tuple[list[str], list[SnapshotRecord]]:
    """The keys of a page of sessions behind the key `after`, and the newest snapshots of those that live."""
    keys = [key for key, _ in await ledger.transaction.scan("session/", BATCH, after)]
    sessions = await ledger.find_all(SessionRecord, [name_in(key) for key in keys])
    newest = [
        session.checkpoints[-1].snapshot
        for session in sessions
        if session is not None and session.checkpoints and session.expires_at > ledger.now
    ]
    return keys, [record for record in await ledger.find_all(SnapshotRecord, newest) if record is not None]
