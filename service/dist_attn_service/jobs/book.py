"""The catalogue of jobs: who has which, what waits, who works on what, what expires, and how much disk all take.

Keys: job/ID the record; caller/C/TIME/ID those of a caller; open/TIME/ID what has not ended, in order of arrival;
expiry/TIME/ID when it may go; usage the bytes of all, usage/C the number of a caller's jobs.
"""

import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, final

import msgspec

from dist_attn.errors import ConfigError, StorageError
from dist_attn.store.disk import CATALOGUE, DiskRecords, has_records
from dist_attn.store.owner import has_died, this_process
from dist_attn.store.records import BufferedTransaction, Records
from dist_attn.store.redis import RedisRecords, connect
from dist_attn_service.base.errors import Code, NotFound, ServiceError
from dist_attn_service.jobs.record import JobRecord, decode_job, encode_job

__all__ = ["JobBook", "JobGone", "JobLimits", "runner_name"]

Change = Callable[[JobRecord], JobRecord]
T = TypeVar("T")
PAGE = 200
NAMESPACE = "dist-attn-jobs"
REDIS_SCHEMES = ("redis://", "rediss://", "unix://")


class JobGone(NotFound):
    """The job is not in the catalogue any more."""


@dataclass(frozen=True)
class JobLimits:
    """Units: bytes, jobs, seconds."""

    disk_bytes: int
    per_caller: int
    lease_seconds: float


def runner_name() -> str:
    """A name of this process that no other has, and that tells others of this machine whether it lives."""
    return f"{this_process()}/{secrets.token_hex(8)}"


@final
class JobBook:
    """Jobs over records that may be shared by several processes; every change is one transaction."""

    def __init__(self, records: Records, limits: JobLimits, clock: Callable[[], float] = time.time) -> None:
        self._records = records
        self._limits = limits
        self.clock = clock
        self.runner = runner_name()

    async def close(self) -> None:
        """Let go of the records."""
        await self._records.close()

    @staticmethod
    async def open(address: str, folder: Path, limits: JobLimits) -> "JobBook":
        """The catalogue in a file of this folder, or in Redis.

        Raises: StorageError, also for a folder with the files of jobs whose catalogue is lost; ConfigError for an
            address of another kind; MissingExtraError where redis-py is missing.
        """
        if address and not address.startswith(REDIS_SCHEMES):
            raise ConfigError(f"jobs.address is {address!r}; needed is redis://HOST:PORT/DB, or nothing for a file")
        if address:
            return JobBook(RedisRecords(connect(address), NAMESPACE), limits)
        count = 0 if has_records(folder / CATALOGUE) else len([*(folder / "files").glob("??/*")])
        if count:
            raise StorageError(
                f"{folder} holds the files of {count} jobs, and their catalogue {CATALOGUE} is not there or empty; put "
                "a backup of it in its place; to begin without them move the folder away"
            )
        return JobBook(await DiskRecords.open(folder / CATALOGUE), limits)

    async def _transact(self, work: Callable[[BufferedTransaction], Awaitable[T]]) -> T:
        try:
            return await self._records.transact(work)
        except StorageError as error:
            raise ServiceError(str(error), code=Code.STORAGE_FAILED) from None

    async def add(self, record: JobRecord) -> str:
        """Enter a new job; its id.

        Raises: ServiceError (429) when the caller has too many, (507) when the disk of jobs is full.
        """
        name = f"job_{secrets.token_urlsafe(24)}"

        async def enter(transaction: BufferedTransaction) -> None:
            count = await _number(transaction, f"usage/{record.caller}")
            if count >= self._limits.per_caller:
                raise ServiceError(
                    f"you have {count} jobs, which is the limit; delete some, or let them expire",
                    code=Code.INSUFFICIENT_QUOTA,
                    headers={"x-should-retry": "false"},
                )
            _put_number(transaction, f"usage/{record.caller}", count + 1)
            await self._write(transaction, name, None, record)

        await self._transact(enter)
        return name

    async def get(self, name: str, caller: str | None = None) -> JobRecord:
        """A job; with `caller` only one of that caller's.

        Raises: NotFound.
        """
        value = await self._transact(lambda transaction: transaction.get(f"job/{name}"))
        record = None if value is None else decode_job(value)
        if record is None or self._hidden(record) or (caller is not None and record.caller != caller):
            raise NotFound("there is no such job; it has expired, was deleted, or is another caller's", param="id")
        return record

    async def listed(self, caller: str, after: str, limit: int) -> list[tuple[str, JobRecord]]:
        """A caller's jobs in order of arrival, those after this one."""
        prefix = f"caller/{caller}/"

        async def read(transaction: BufferedTransaction) -> list[tuple[str, JobRecord]]:
            start = ""
            if after:
                known = await transaction.get(f"job/{after}")
                start = "" if known is None else _caller_key(after, decode_job(known))
            found: list[tuple[str, JobRecord]] = []
            for key, _ in await transaction.scan(prefix, limit + PAGE, start):
                name = key.rpartition("/")[2]
                value = await transaction.get(f"job/{name}")
                record = None if value is None else decode_job(value)
                if record is not None and not self._hidden(record) and record.state != "receiving":
                    found.append((name, record))
            return found[:limit]

        return await self._transact(read)

    async def change(self, name: str, work: Change) -> JobRecord:
        """Change a job; what it is then.

        Raises: NotFound; ServiceError (507) when it would take more disk than there is for all jobs.
        """

        async def run(transaction: BufferedTransaction) -> JobRecord:
            value = await transaction.get(f"job/{name}")
            if value is None:
                raise JobGone("there is no such job any more", param="id")
            before = decode_job(value)
            after = work(before)
            await self._write(transaction, name, before, after)
            return after

        return await self._transact(run)

    async def remove(self, name: str) -> None:
        """Forget a job."""

        async def run(transaction: BufferedTransaction) -> None:
            value = await transaction.get(f"job/{name}")
            if value is None:
                return
            record = decode_job(value)
            used = await _number(transaction, "usage")
            _put_number(transaction, "usage", max(0, used - record.disk_bytes))
            count = await _number(transaction, f"usage/{record.caller}")
            _put_number(transaction, f"usage/{record.caller}", max(0, count - 1))
            for key in (f"job/{name}", *_keys(name, record)):
                transaction.delete(key)

        await self._transact(run)

    async def claim(self, work: Change) -> tuple[str, JobRecord] | None:
        """Become the runner of the job that has waited longest, changed by `work`; None where none waits.

        A job whose runner has died waits again.
        """

        async def run(transaction: BufferedTransaction) -> tuple[str, JobRecord] | None:
            now, after = self.clock(), ""
            while page := await transaction.scan("open/", PAGE, after):
                for key, _ in page:
                    name = key.rpartition("/")[2]
                    value = await transaction.get(f"job/{name}")
                    record = None if value is None else decode_job(value)
                    if record is not None and self._waits(record, now):
                        lease = now + self._limits.lease_seconds
                        mine = msgspec.structs.replace(record, runner=self.runner, lease_until=lease)
                        mine = work(mine)
                        await self._write(transaction, name, record, mine)
                        return name, mine
                after = page[-1][0]
            return None

        return await self._transact(run)

    async def ahead(self, name: str, record: JobRecord) -> float:
        """Tokens of jobs that have waited longer; of those that do not know, none count."""

        async def run(transaction: BufferedTransaction) -> float:
            total = 0.0
            for key, _ in await transaction.scan("open/", PAGE):
                if key >= _open_key(name, record):
                    break
                value = await transaction.get(f"job/{key.rpartition('/')[2]}")
                other = None if value is None else decode_job(value)
                if other is not None and other.kind == "encoding":
                    total += max(0.0, (other.expected_tokens or 0) - other.tokens)
            return total

        return await self._transact(run)

    async def lost(self, deletable_until: Callable[[float], float]) -> list[str]:
        """Jobs that may go: those that have expired or were deleted, and bodies whose receiver died.

        Those that live for so many seconds may go if they expired at the time that `deletable_until` gives, or before.
        """

        async def run(transaction: BufferedTransaction) -> list[str]:
            found = []
            for name, record in await _indexed(transaction, "expiry/", f"{self.clock():017.3f}"):
                if record.expires_at <= deletable_until(record.life_s):
                    found.append(name)
            for name, record in await _indexed(transaction, "open/"):
                unwanted = record.state == "receiving" or record.deleted
                if unwanted and self.dead(record, deletable_until(self._limits.lease_seconds)):
                    found.append(name)
            return list(dict.fromkeys(found))

        return await self._transact(run)

    def _hidden(self, record: JobRecord) -> bool:
        """Whether callers are not shown it any more: it was deleted, or has expired, and goes later."""
        return record.deleted or record.expires_at <= self.clock()

    def dead(self, record: JobRecord, now: float) -> bool:
        """Whether nobody works on it, as far as this process can know."""
        if not record.runner or record.lease_until <= now:
            return True
        return has_died(record.runner.rpartition("/")[0])

    def _waits(self, record: JobRecord, now: float) -> bool:
        if self._hidden(record) or record.retry_at > now:
            return False
        return record.state == "queued" or (record.state == "running" and self.dead(record, now))

    async def _write(
        self, transaction: BufferedTransaction, name: str, before: JobRecord | None, after: JobRecord
    ) -> None:
        grown = after.disk_bytes - (0 if before is None else before.disk_bytes)
        if grown:
            used = await _number(transaction, "usage")
            if grown > 0 and used + grown > self._limits.disk_bytes:
                raise ServiceError(
                    f"jobs may take {self._limits.disk_bytes} bytes of this service's disk, and {used} are taken; "
                    "delete jobs whose results you have, or wait for some to expire",
                    code=Code.DISK_FULL,
                )
            _put_number(transaction, "usage", used + grown)
        if before is not None:
            for key in _keys(name, before):
                transaction.delete(key)
        for key in _keys(name, after):
            transaction.put(key, b"")
        transaction.put(f"job/{name}", encode_job(after))


def _keys(name: str, record: JobRecord) -> list[str]:
    """The index keys of a job."""
    keys = [_caller_key(name, record), f"expiry/{record.expires_at:017.3f}/{name}"]
    return keys if record.ended and not record.deleted else [*keys, _open_key(name, record)]


def _open_key(name: str, record: JobRecord) -> str:
    return f"open/{record.created_at:017.3f}/{name}"


def _caller_key(name: str, record: JobRecord) -> str:
    return f"caller/{record.caller}/{record.created_at:017.3f}/{name}"


async def _indexed(transaction: BufferedTransaction, index: str, stop: str = "~") -> list[tuple[str, JobRecord]]:
    """The jobs of an index by time, up to the time `stop`."""
    found: list[tuple[str, JobRecord]] = []
    after = ""
    while page := await transaction.scan(index, PAGE, after):
        for after, _ in page:
            if after.split("/")[1] > stop:
                return found
            name = after.rpartition("/")[2]
            if (value := await transaction.get(f"job/{name}")) is not None:
                found.append((name, decode_job(value)))
    return found


async def _number(transaction: BufferedTransaction, key: str) -> int:
    value = await transaction.get(key)
    return 0 if value is None else int(value)


def _put_number(transaction: BufferedTransaction, key: str, value: int) -> None:
    transaction.put(key, str(value).encode())
