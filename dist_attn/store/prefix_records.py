"""The records of the prefix index, and their order of use."""

from dist_attn.store.entries import PrefixRecord, changed, decode, encode, moment
from dist_attn.store.ledger import Ledger

__all__ = ["add_prefix", "drop_prefix", "find_prefix", "touch_prefix"]

TOUCH_S = 60.0  # used again within this time, a prefix keeps its place


async def find_prefix(ledger: Ledger, key: str) -> PrefixRecord | None:
    """The record of a prefix."""
    value = await ledger.transaction.get(f"prefix/{key}")
    return None if value is None else decode(value, PrefixRecord)


async def add_prefix(ledger: Ledger, key: str, record: PrefixRecord) -> None:
    """Enter a prefix that is not there yet; the caller's least used one goes where there are too many.

    Raises: UnknownStateError when its snapshot is not there.
    """
    await ledger.refer(record.tenant, record.snapshot)
    await ledger.count(record.tenant, prefixes=1)
    _save(ledger, key, record)
    while (await ledger.usage(record.tenant)).prefixes > ledger.limits.tenant_prefixes:
        ((oldest, _),) = await ledger.transaction.scan(f"tenant-lru/{record.tenant}/", 1)
        await drop_prefix(ledger, oldest.split("/")[3])


def touch_prefix(ledger: Ledger, key: str, record: PrefixRecord) -> None:
    """It was used now."""
    if ledger.now - record.used_at >= TOUCH_S:
        for index in _indices(key, record):
            ledger.transaction.delete(index)
        _save(ledger, key, changed(record, used_at=ledger.now))


async def drop_prefix(ledger: Ledger, key: str) -> None:
    """Forget a prefix."""
    record = await find_prefix(ledger, key)
    if record is None:
        return
    for name in (*_indices(key, record), f"prefix/{key}"):
        ledger.transaction.delete(name)
    await ledger.count(record.tenant, prefixes=-1)
    await ledger.release(record.snapshot)


def _save(ledger: Ledger, key: str, record: PrefixRecord) -> None:
    for index in _indices(key, record):
        ledger.transaction.put(index, b"")
    ledger.transaction.put(f"prefix/{key}", encode(record))


def _indices(key: str, record: PrefixRecord) -> tuple[str, str]:
    at = moment(record.used_at)
    return f"lru/{at}/{key}", f"tenant-lru/{record.tenant}/{at}/{key}"
