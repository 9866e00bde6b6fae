"""The books of one transaction: records, with the indices that find them and the sums that they add to.

A record says itself in which of these it stands, and the ledger writes all of them together, so that they always agree.
Stored states, uploads and jobs keep their books with it; what they have of their own are records, rules and bounds.
Values are JSON, so that a catalogue can be looked at.
"""

import hashlib
import hmac
import os
import secrets
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import msgspec
from msgspec import structs

from dist_attn.errors import StorageError
from dist_attn.store.ports import BufferedTransaction, Records

SECRET_BYTES = 32
PAGE = 1000  # records that are read together where all are

T = TypeVar("T")
L = TypeVar("L", bound="Ledger")
R = TypeVar("R", bound="Record")
S = TypeVar("S", bound="Sums | int")


class Sums(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Numbers that are added up field by field, from 0."""


class Record(msgspec.Struct, frozen=True):
    """The value under the key `KIND/NAME`."""

    KIND: ClassVar[str]

    def index(self, name: str) -> tuple[str, ...]:
        """The keys, without values, by which the record is found."""
        return ()

    def sums(self) -> "Mapping[str, Sums | int]":
        """The amounts that the record adds, by the keys of their sums."""
        return {}


class Ledger:
    """The books in one transaction: records, changed with all that belongs to them. Time is in seconds since 1970."""

    def __init__(self, transaction: BufferedTransaction, now: float) -> None:
        self.transaction = transaction
        self.now = now
        self.dropped: list[str] = []
        """The blobs to delete once the transaction is committed."""

    async def find(self, kind: type[R], name: str) -> R | None:
        """The record of this name, None where there is none."""
        (record,) = await self.find_all(kind, [name])
        return record

    async def find_all(self, kind: type[R], names: Iterable[str]) -> list[R | None]:
        """The records of these names, None where there is none."""
        values = await self.transaction.get_many(f"{kind.KIND}/{name}" for name in names)
        return [None if value is None else decode(value, kind) for value in values]

    async def save(self, name: str, record: Record, before: Record | None = None) -> None:
        """Write a record, in place of `before` where there was one.

        Raises: what `check` raises.
        """
        await self._move_sums({} if before is None else before.sums(), record.sums())
        index = record.index(name)
        for key in () if before is None else before.index(name):
            if key not in index:
                self.transaction.delete(key)
        for key in index:
            self.transaction.put(key, b"")
        self.transaction.put(f"{record.KIND}/{name}", encode(record))

    async def forget(self, name: str, record: Record) -> None:
        """Remove a record."""
        await self._move_sums(record.sums(), {})
        for key in (*record.index(name), f"{record.KIND}/{name}"):
            self.transaction.delete(key)

    async def total(self, key: str, kind: type[S]) -> S:
        """Read the sum under `key`."""
        value = await self.transaction.get(key)
        return kind() if value is None else decode(value, kind)

    async def usage(self, kind: type[S], tenant: str = "") -> S:
        """The sums of a caller; without a name, those of all."""
        return await self.total(f"usage/{tenant}" if tenant else "total", kind)

    def check(self, key: str, before: Any, after: Any) -> None:
        """Refuse a sum that grows too large. Raises: whatever an overriding class refuses it with."""

    async def due(self, index: str, after: str, limit: int) -> tuple[list[str], str]:
        """Find up to `limit` keys `INDEX/TIME/…` whose time has come, behind the key `after`, in order.

        With them the key behind which there may be more, "" at the end.
        """
        page = [key for key, _ in await self.transaction.scan(index, limit, after)]
        due = [key for key in page if key.split("/")[1] <= moment(self.now)]
        return due, due[-1] if len(due) == limit else ""

    async def _move_sums(self, before: "Mapping[str, Sums | int]", after: "Mapping[str, Sums | int]") -> None:
        for key, part in ({**before, **after}).items():
            kind = type(part)
            less, more = before.get(key, kind()), after.get(key, kind())
            if less == more:
                continue
            total = await self.total(key, kind)
            result = _moved(total, less, more)
            if any(new > old for new, old in zip(_numbers(more), _numbers(less), strict=True)):
                self.check(key, total, result)
            if result == kind():
                self.transaction.delete(key)
            else:
                self.transaction.put(key, encode(result))


def name_in(key: str) -> str:
    """The name at the end of a key."""
    return key.rpartition("/")[2]


def of_tenant(tenant: str, usage: Sums) -> Mapping[str, Sums]:
    """The sums of a record that counts for one caller and for all."""
    return {f"usage/{tenant}": usage, "total": usage}


def _moved(total: S, less: "Sums | int", more: "Sums | int") -> S:
    """Take one part off a sum and add another; the sum is never less than 0."""
    numbers = zip(_numbers(total), _numbers(less), _numbers(more), strict=True)
    return type(total)(*(max(0, all_ - old + new) for all_, old, new in numbers))


def _numbers(value: "Sums | int") -> tuple[int, ...]:
    return (value,) if isinstance(value, int) else structs.astuple(value)


async def change(
    records: Records, opened: Callable[[BufferedTransaction], L], work: Callable[[L], Awaitable[T]]
) -> tuple[T, list[str]]:
    """Run work on a ledger in one transaction; returns its result, and the blobs that it has dropped.

    Raises: StorageError; whatever `work` raises, and then nothing changes.
    """
    ledgers: list[L] = []

    async def run(transaction: BufferedTransaction) -> T:
        ledgers[:] = [opened(transaction)]  # the work may run again
        return await work(ledgers[0])

    result = await records.transact(run)
    return result, ledgers[0].dropped


async def every_page(page: Callable[[str], Awaitable[tuple[T, str]]]) -> list[T]:
    """Collect the results of all pages; each is given its beginning and returns that of the next, "" after the last."""
    results, after = [], ""
    while True:
        result, after = await page(after)
        results.append(result)
        if not after:
            return results


async def all_records(records: Records, kind: type[R]) -> dict[str, R]:
    """Read every record of a kind by its name, a page at a time, so that others may work meanwhile.

    Raises: StorageError.
    """
    values = await all_values(records, f"{kind.KIND}/")
    return {key.partition("/")[2]: decode(value, kind) for key, value in values.items()}


async def all_values(records: Records, prefix: str) -> dict[str, bytes]:
    """Read every value whose key begins with `prefix`, by its key. Raises: StorageError."""

    async def page(after: str) -> tuple[list[tuple[str, bytes]], str]:
        rows = await records.transact(lambda transaction: transaction.scan(prefix, PAGE, after))
        return rows, rows[-1][0] if len(rows) == PAGE else ""

    return {key: value for rows in await every_page(page) for key, value in rows}


async def wrong_sums(records: Records, kind: type[S], counted: Iterable[Record]) -> list[str]:
    """Say in words where the sums of callers and of all are not those of these records.

    Raises: StorageError.
    """
    stored = await all_values(records, "total") | await all_values(records, "usage/")
    known: dict[str, Sums | int] = {key: decode(value, kind) for key, value in stored.items()}
    sums: dict[str, Sums | int] = {}
    for record in counted:
        for key, part in record.sums().items():
            sums[key] = _moved(sums.get(key, kind()), kind(), part)
    return [
        f"the sum {key} is {known.get(key)}; it should be {sums.get(key)}"
        for key in sorted(sums.keys() | known.keys())
        if known.get(key, kind()) != sums.get(key, kind())
    ]


# ---- the secret ---------------------------------------------------------------------------------


async def secret_of(records: Records) -> bytes:
    """The secret that salts every name in these records: drawn on the first call, and the same on all later ones.

    Raises: StorageError.
    """

    async def settle(transaction: BufferedTransaction) -> bytes:
        secret = await transaction.get("secret")
        if secret is None:
            secret = secrets.token_bytes(SECRET_BYTES)
            transaction.put("secret", secret)
        return secret

    return await records.transact(settle)


def salted(secret: bytes, message: bytes) -> str:
    """HMAC-SHA256 in hex; callers' names stand in keys like this, so that they are neither shown nor misread."""
    return hmac.new(secret, message, hashlib.sha256).hexdigest()


async def unknown_beside(records: Records, count: Callable[[], Awaitable[int]]) -> int:
    """Count the blobs beside records that have not been begun, which would not know them; 0 where they have been.

    Raises: StorageError.
    """

    async def begun() -> bool:
        return await records.transact(lambda transaction: transaction.get("secret")) is not None

    # Asked twice, as another process may begin them and write blobs meanwhile.
    return 0 if await begun() or not (blobs := await count()) or await begun() else blobs


# ---- values -------------------------------------------------------------------------------------


def moment(time: float) -> str:
    """Format seconds since 1970 as a key: keys stand in the order of time."""
    return f"{max(0.0, time):017.3f}"


def encode(value: object) -> bytes:
    """Encode a record."""
    return msgspec.json.encode(value)


def decode(data: bytes, kind: type[T]) -> T:
    """Decode a record.

    Raises: StorageError when they are none.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StorageError(f"the catalogue holds what is no {kind.__name__} ({error}); it is damaged") from None


changed = structs.replace
"""A copy of a record with other values in some fields."""


def this_process() -> str:
    """The name of this process, unlike any other before, beside or after it; "" where the system does not tell."""
    begun = _begun(os.getpid())
    return f"{_place()}/{os.getpid()}.{begun}" if _place() and begun else ""


def has_died(owner: str) -> bool:
    """Return whether the process that `this_process` named is dead for sure; one of another machine never is.

    Cost: one read of /proc.
    """
    place, _, process = owner.rpartition("/")
    pid, _, begun = process.partition(".")
    if not place or place != _place() or not pid.isdecimal():
        return False
    # A number that another process has by now, as the first one of every container has, is not that process.
    return _begun(int(pid)) != begun and not _hidden(int(pid))


@cache
def _place() -> str:
    """The name of this boot and of the process numbers here: a container has numbers of its own."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}.{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _begun(pid: int) -> str:
    """The time when a process began, in the clock's ticks; "" where there is none, or it may not be looked at.

    A process that has ended and that nobody has waited for yet is there, but is told as "ended".
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    fields = stat.rpartition(")")[2].split()  # behind the name, which may hold anything: from field 3 on
    return "ended" if fields[0] in "ZX" else fields[19]


def _hidden(pid: int) -> bool:
    """Return whether there is such a process that this one may not look at."""
    if _begun(pid):
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
