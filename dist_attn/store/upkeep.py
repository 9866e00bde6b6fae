"""Collection, eviction and repair: what expires goes, what is needed stays, and the books agree with the bytes.

What has expired is deleted after a grace (`grace.py`), as the clock may be wrong. When the store, or a caller's share
of it, is full, this goes, in this order: sessions that have expired and whose grace is over, snapshots that nobody
refers to, prefixes that were used longest ago, then all but the newest checkpoint of the sessions that end soonest. The
newest state of a session is never evicted.
"""

from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TypeVar, final

import msgspec

from dist_attn.errors import StorageError
from dist_attn.store.blobs import born_at
from dist_attn.store.entries import PrefixRecord, SessionRecord, SnapshotRecord, Usage, changed, decode, moment
from dist_attn.store.grace import ExpiryGrace
from dist_attn.store.ledger import Ledger
from dist_attn.store.place import Place
from dist_attn.store.prefix_records import drop_prefix, find_prefix

__all__ = ["Collected", "Upkeep"]

BATCH = 64  # records of one transaction
EVICTED, PAGES = 8, 1024  # entries that are looked at together, and how often, for what may go
T = TypeVar("T")


class Collected(msgspec.Struct, frozen=True):
    """What was removed."""

    sessions: int = 0
    snapshots: int = 0
    orphans: int = 0


@final
class Upkeep:
    """Keeps a place in order; any process that shares it may, at any time."""

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
            lambda ledger, after: _end_expired(ledger, after, lambda record: record.expires_at <= until(record.ttl_s))
        )
        snapshots = await self._all_pages(
            lambda ledger, after: ledger.drop_loose(
                BATCH, after, lambda record: record.held_until <= until(record.held_until - record.made_at)
            )
        )
        return Collected(sessions, snapshots)

    async def _all_pages(self, drop: Callable[[Ledger, str], Awaitable[tuple[int, str]]]) -> int:
        """Drop one page after the other, each in a transaction of its own; how many went in all."""
        dropped, after = 0, ""
        while True:
            found, after = await self._place.change(lambda ledger, after=after: drop(ledger, after))  # type: ignore[misc]
            dropped += found
            if not after:
                return dropped

    async def make_room(self, size: int, tenant: str = "", *, checkpoints: bool = True) -> bool:
        """Evict until `size` more bytes fit into the store, or into the share of one caller; whether they do.

        Nothing goes in vain: only what takes its bytes along, so nothing that something else refers to or holds.
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
        usage = await self._place.change(lambda ledger: ledger.usage(tenant))
        return usage.bytes + size > (limits.tenant_bytes if tenant else limits.store_bytes)

    async def repair(self) -> Collected:
        """Remove bytes that no record names and no writer can still be writing, after their grace.

        Raises: StorageError.
        """
        orphans, orphan_s = 0, self._place.limits.orphan_s
        until = self.grace.deletable_until(orphan_s)
        if until < 0:
            return Collected()
        names = {record.blob for _, record in await self._all("snapshot/", SnapshotRecord)}
        async for blob in self._place.blobs.names():
            if blob not in names and born_at(blob) + orphan_s <= until:
                await self._place.blobs.delete(blob)
                orphans += 1
        return Collected(orphans=orphans)

    async def audit(self) -> list[str]:
        """What is wrong, in words: references and sums that do not agree, bytes that are missing. Nothing is changed.

        Raises: StorageError.
        """
        snapshots = dict(await self._all("snapshot/", SnapshotRecord))
        sessions = await self._all("session/", SessionRecord)
        prefixes = await self._all("prefix/", PrefixRecord)
        references = Counter(point.snapshot for _, session in sessions for point in session.checkpoints)
        references.update(prefix.snapshot for _, prefix in prefixes)
        lost = references.keys() - snapshots.keys()
        wrong = [f"a session or prefix refers to snapshot {name}, which is not there" for name in lost]
        blobs = {blob async for blob in self._place.blobs.names()}
        for name, record in snapshots.items():
            if record.references != references[name]:
                wrong.append(f"snapshot {name} counts {record.references} references; there are {references[name]}")
            if record.blob not in blobs:
                wrong.append(f"the bytes of snapshot {name} are missing")
        sums: dict[str, Usage] = {}
        for tenant, change in (
            *((record.tenant, {"size": record.size, "snapshots": 1}) for record in snapshots.values()),
            *((session.tenant, {"sessions": 1}) for _, session in sessions),
            *((prefix.tenant, {"prefixes": 1}) for _, prefix in prefixes),
        ):
            for name in (tenant, ""):
                sums[name] = sums.get(name, Usage()).plus(**change)
        stored = dict(await self._all("usage/", Usage)) | {"": await self._place.change(lambda ledger: ledger.usage())}
        for name in sums.keys() | stored.keys():
            if stored.get(name, Usage()) != sums.get(name, Usage()):
                wrong.append(f"usage of {name or 'all'} is {stored.get(name)}; it should be {sums.get(name)}")
        return wrong

    async def _all(self, prefix: str, kind: type[T]) -> list[tuple[str, T]]:
        """All records under a prefix, a batch at a time, so that others may work meanwhile."""
        found: list[tuple[str, T]] = []
        after = ""
        while True:
            page = await self._place.records.transact(lambda t, after=after: t.scan(prefix, 1000, after))  # type: ignore[misc]
            found += [(key.removeprefix(prefix), decode(value, kind)) for key, value in page]
            if len(page) < 1000:
                return found
            after = page[-1][0]


async def _end_expired(ledger: Ledger, after: str, may_go: Callable[[SessionRecord], bool]) -> tuple[int, str]:
    """End those of one page of expired sessions that may go: how many, and behind which key there may be more."""
    ended, last = 0, ""
    for key, _ in await ledger.transaction.scan("expiry/", BATCH, after):
        _, time, name = key.split("/")
        if time > moment(ledger.now):
            return ended, ""
        record, last = await ledger.session(name), key
        if record is None:
            raise StorageError(f"the catalogue lists session {name}, which it does not have; it is damaged")
        if may_go(record):
            await ledger.drop_session(name, record)
            ended += 1
    return ended, last


Order = Callable[[Ledger, str, list[str]], Awaitable[int]]


async def _evict(ledger: Ledger, order: Order, tenant: str, after: str) -> str:
    """Drop what takes its bytes along of one page of what may go in this order; where the next page begins."""
    prefix = _index(order, tenant)
    page = [key for key, _ in await ledger.transaction.scan(prefix, EVICTED, after)]
    await order(ledger, tenant, page)
    await ledger.drop_loose(EVICTED * ledger.limits.session_checkpoints)
    return page[-1] if page else ""


def _index(order: Order, tenant: str) -> str:
    if order is _prefixes_by_use:
        return f"tenant-lru/{tenant}/" if tenant else "lru/"
    return f"owned/{tenant}/" if tenant else "expiry/"


async def _prefixes_by_use(ledger: Ledger, tenant: str, page: list[str]) -> int:
    """Drop the prefixes of a page whose states nothing else needs."""
    dropped = 0
    for key in page:
        name = key.split("/")[-1]
        record = await find_prefix(ledger, name)
        if record is not None and await _is_last(ledger, record.snapshot):
            await drop_prefix(ledger, name)
            dropped += 1
    return dropped


async def _older_checkpoints(ledger: Ledger, tenant: str, page: list[str]) -> int:
    """Drop those checkpoints of a page of sessions that are not their newest, and whose states nothing else needs."""
    dropped = 0
    for key in page:
        name = key.split("/")[-1]
        record = await ledger.session(name)
        if record is None:
            continue
        gone = [point for point in record.checkpoints[:-1] if await _is_last(ledger, point.snapshot)]
        for point in gone:
            await ledger.release(point.snapshot)
        if gone:
            kept = tuple(point for point in record.checkpoints if point not in gone)
            ledger.save_session(name, changed(record, checkpoints=kept), record)
            dropped += len(gone)
    return dropped


async def _is_last(ledger: Ledger, snapshot: str) -> bool:
    """Whether the bytes of a snapshot go with one more reference to it."""
    record = await ledger.snapshot(snapshot)
    return record is not None and record.references == 1 and record.held_until <= ledger.now
