"""Collection, eviction and repair: what expires goes, what is needed stays, and the books agree with the bytes.

What has expired is deleted after a grace (`ExpiryGrace`), as the clock may be wrong. When the store, or a caller's
share of it, is full, this goes, in this order: sessions that have expired and whose grace is over, snapshots that
nobody refers to, prefixes that were used longest ago, then all but the newest checkpoint of the sessions that end
soonest. The newest state of a session is never evicted.
"""

import hashlib
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import final

import msgspec
import numpy as np
import numpy.typing as npt

from dist_attn.store.entries import PrefixRecord, SessionRecord, SnapshotRecord, Usage
from dist_attn.store.ledger import PAGE, all_records, changed, decode, every_page, name_in, wrong_sums
from dist_attn.store.ports import born_at
from dist_attn.store.state_ledger import Place, StateLedger

BATCH = 64  # records of one transaction
EVICTED, PAGES = 8, 1024  # entries that are looked at together, and how often, for what may go
JUMP_S = 5.0  # the wall clock is corrected by less between two looks, unless it is set


@final
class ExpiryGrace:
    """The wait for a deletion until the wall clock has run evenly for a time of the monotonic one, at most `grace_s`.

    Entries expire by the wall clock, as they outlive processes. A clock that is set wrong, or a machine that wakes up
    with a wrong one, would end all of them at once. So what has expired is hidden at once, and deleted only after it
    has stayed expired for that time; a jump of the wall clock against the monotonic one starts it anew, and so does a
    restart. Meanwhile the clock can be corrected, and what was hidden is there again.

    One object serves one kind of upkeep, for as long as that runs.
    """

    def __init__(
        self,
        grace_s: float,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._grace_s = grace_s
        self._clock = clock
        self._monotonic = monotonic
        self._since = monotonic()
        self._offset = clock() - self._since
        self._jumped_s = 0.0

    def deletable_until(self, life_s: float = math.inf) -> float:
        """The latest time of expiry that may be deleted now, in seconds since 1970; minus infinity: nothing may be.

        `life_s` is the life of the entry that is asked for: once so much time has passed it has expired by any clock,
        so its grace is no longer than that.
        """
        now, wall = self._monotonic(), self._clock()
        jump = wall - now - self._offset
        self._offset = wall - now
        if abs(jump) > JUMP_S:
            self._since = now
            self._jumped_s += jump
            return -math.inf
        grace_s = min(self._grace_s, life_s)
        return wall - grace_s if now - self._since >= grace_s else -math.inf

    def take_jump(self) -> float:
        """Return by how many seconds the wall clock has jumped since the last call, 0 if it has not; for the log."""
        jumped, self._jumped_s = self._jumped_s, 0.0
        return jumped


class Collected(msgspec.Struct, frozen=True):
    """The numbers of entries that were removed."""

    sessions: int = 0
    snapshots: int = 0
    orphans: int = 0


@final
class Upkeep:
    """The work that keeps a place in order; any process that shares the place may do it, at any time."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self.grace = ExpiryGrace(place.limits.grace_s, place.clock, place.monotonic)

    async def collect(self) -> Collected:
        """Remove expired sessions, then snapshots that nobody refers to and nobody holds, both after their grace.

        Raises: StorageError.
        """
        until = self.grace.deletable_until
        until()  # a clock that jumps back is seen by this round, also where nothing has expired
        sessions = await self._all_pages(
            lambda ledger, after: ledger.drop_expired(
                BATCH, after, lambda record: record.expires_at <= until(record.ttl_s)
            )
        )
        snapshots = await self._all_pages(
            lambda ledger, after: ledger.drop_loose(
                BATCH, after, lambda record: record.held_until <= until(record.held_until - record.made_at)
            )
        )
        return Collected(sessions, snapshots)

    async def _all_pages(self, drop: Callable[[StateLedger, str], Awaitable[tuple[int, str]]]) -> int:
        """Drop one page after the other, each in a transaction of its own; returns how many entries went in all."""
        return sum(await every_page(lambda after: self._place.change(lambda ledger: drop(ledger, after))))

    async def make_room(self, size: int, tenant: str = "", *, checkpoints: bool = True) -> bool:
        """Evict until `size` more bytes fit into the store, or into the share of one caller; true if they do.

        Only what takes its bytes along goes, so nothing that something else refers to or holds.
        Without `checkpoints` none of a session goes.

        Raises: StorageError.
        """
        if not await self._lacks(size, tenant):
            return True
        await self.collect()
        await self._all_pages(lambda ledger, after: ledger.drop_loose(BATCH, after))
        for order in (_prefixes_by_use, _older_checkpoints)[: 1 + checkpoints]:
            after = ""
            for _ in range(PAGES):
                if not await self._lacks(size, tenant):
                    return True
                after = await self._place.change(lambda ledger, o=order, a=after: _evict(ledger, o, tenant, a))  # type: ignore[misc]
                if not after:
                    break
        return not await self._lacks(size, tenant)

    async def _lacks(self, size: int, tenant: str) -> bool:
        limits = self._place.limits
        usage = await self._place.change(lambda ledger: ledger.used(tenant))
        return usage.bytes + size > (limits.tenant_bytes if tenant else limits.store_bytes)

    async def repair(self) -> Collected:
        """Remove bytes that no record names and no writer can still be writing, after their grace.

        Raises: StorageError.
        """
        orphans, orphan_s = 0, self._place.limits.orphan_s
        until = self.grace.deletable_until(orphan_s)
        if until < 0:
            return Collected()
        marks_N = await self._marks()
        async for blob in self._place.blobs.names():
            at = np.searchsorted(marks_N, mark := _mark(blob))
            named = at < len(marks_N) and marks_N[at] == mark
            if not named and born_at(blob) + orphan_s <= until:
                await self._place.blobs.delete(blob)
                orphans += 1
        return Collected(orphans=orphans)

    async def _marks(self) -> npt.NDArray[np.uint64]:
        """The marks of all blobs that records name, sorted: of a million they take 8 MB."""

        async def page(after: str) -> tuple[npt.NDArray[np.uint64], str]:
            rows = await self._place.records.transact(lambda transaction: transaction.scan("snapshot/", PAGE, after))
            marks = [_mark(decode(value, SnapshotRecord).blob) for _, value in rows]
            return np.array(marks, dtype=np.uint64), rows[-1][0] if len(rows) == PAGE else ""

        return np.sort(np.concatenate(await every_page(page)))

    async def audit(self) -> list[str]:
        """Say in words what is wrong: references or sums that do not agree, bytes that are missing. Nothing is changed.

        Raises: StorageError.
        """
        records = self._place.records
        snapshots = await all_records(records, SnapshotRecord)
        sessions = (await all_records(records, SessionRecord)).values()
        prefixes = (await all_records(records, PrefixRecord)).values()
        references = Counter(point.snapshot for session in sessions for point in session.checkpoints)
        references.update(prefix.snapshot for prefix in prefixes)
        lost = references.keys() - snapshots.keys()
        wrong = [f"a session or prefix refers to snapshot {name}, which is not there" for name in lost]
        blobs = {blob async for blob in self._place.blobs.names()}
        for name, record in snapshots.items():
            if record.references != references[name]:
                wrong.append(f"snapshot {name} counts {record.references} references; there are {references[name]}")
            if record.blob not in blobs:
                wrong.append(f"the bytes of snapshot {name} are missing")
        return wrong + await wrong_sums(records, Usage, (*snapshots.values(), *sessions, *prefixes))


def _mark(blob: str) -> np.uint64:
    """A hash of a blob's name; where two have one, bytes that could go stay."""
    return np.uint64(int.from_bytes(hashlib.blake2b(blob.encode(), digest_size=8).digest()))


Order = Callable[[StateLedger, list[str]], Awaitable[None]]


async def _evict(ledger: StateLedger, order: Order, tenant: str, after: str) -> str:
    """Drop, of one page in this order, the entries that take their bytes along; returns where the next page begins."""
    if order is _prefixes_by_use:
        index = f"tenant-lru/{tenant}/" if tenant else "lru/"
    else:
        index = f"owned/{tenant}/" if tenant else "expiry/"
    page = [key for key, _ in await ledger.transaction.scan(index, EVICTED, after)]
    await order(ledger, [name_in(key) for key in page])
    await ledger.drop_loose(EVICTED * ledger.limits.session_checkpoints)
    return page[-1] if page else ""


async def _prefixes_by_use(ledger: StateLedger, names: list[str]) -> None:
    """Drop the prefixes whose states nothing else needs."""
    for name in names:
        record = await ledger.find(PrefixRecord, name)
        if record is not None and await _is_last(ledger, record.snapshot):
            await ledger.drop_prefix(name)


async def _older_checkpoints(ledger: StateLedger, names: list[str]) -> None:
    """Drop the checkpoints of these sessions but their newest ones, where nothing else needs their states."""
    for name in names:
        record = await ledger.find(SessionRecord, name)
        if record is None:
            continue
        gone = [point for point in record.checkpoints[:-1] if await _is_last(ledger, point.snapshot)]
        for point in gone:
            await ledger.release(point.snapshot)
        if gone:
            points = tuple(point for point in record.checkpoints if point not in gone)
            await ledger.save(name, changed(record, checkpoints=points), record)


async def _is_last(ledger: StateLedger, snapshot: str) -> bool:
    """Return whether the bytes of a snapshot go with its next lost reference."""
    record = await ledger.find(SnapshotRecord, snapshot)
    return record is not None and record.references == 1 and record.held_until <= ledger.now
