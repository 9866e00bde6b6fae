"""The catalogue of jobs: their callers, their order, the processes that run them, their expiry, and the disk they take.

job/ID                   JobRecord
caller/CALLER/TIME/ID    the jobs of a caller
open/TIME/ID             jobs that have not ended, or are deleted and to be removed, in order of arrival
expiry/TIME/ID           jobs by the time from which they may be removed
usage, usage/CALLER      the bytes of all, and the number of a caller's jobs
"""

import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar, final

import msgspec

from dist_attn.errors import ConfigError, StorageError
from dist_attn.settings import DataFolder
from dist_attn.store.disk import CATALOGUE, has_records
from dist_attn.store.files import BlobFolder
from dist_attn.store.ledger import Ledger, Record, change, changed, has_died, moment, name_in, this_process
from dist_attn.store.open import is_redis, lost_catalogue, open_records
from dist_attn.store.ports import BufferedTransaction, Records
from dist_attn.wire.messages import RowSpec
from dist_attn_service.base.errors import NO_RETRY, Code, NotFound, ServiceError
from dist_attn_service.base.settings import Settings
from dist_attn_service.encodings.encoding_run import RunPoint

State = Literal["receiving", "queued", "running", "succeeded", "failed", "cancelled"]
ENDED: tuple[State, ...] = ("succeeded", "failed", "cancelled")
KEPT_EVENTS = 64


Change = Callable[["JobRecord"], "JobRecord"]
T = TypeVar("T")
PAGE = 200
NAMESPACE = "dist-attn-jobs"


class Event(msgspec.Struct, frozen=True):
    """An event of a job; `number` grows by at least 1, `at` is a unix time in seconds."""

    number: int
    type: str
    at: float
    data: dict[str, Any]


class JobPoint(msgspec.Struct, frozen=True):
    """A point from which an encoding goes on: a place of its document, and the id of the state there."""

    run: RunPoint
    snapshot: str


class JobRecord(Record, frozen=True, kw_only=True):
    """One job. Times are unix times in seconds; `expected_tokens` may be an estimate, `rows` counts those safe on disk.

    `spec` is of an encoding, `completion` the options of a completion as they were sent, with its seed. The process
    that works on it is the `runner`, which is taken for dead after `lease_until`; another then goes on from `point`.
    `input_sha256` is in hex, of all `input_bytes` of an encoding and of the boundaries sent with it, and `dim` counts
    the numbers of its rows; empty and 0 in records of an earlier version. `made_by` is the digest of the model that
    made the rows, empty where states of it cannot be stored.
    """

    KIND: ClassVar[str] = "job"
    caller: str
    kind: Literal["encoding", "completion"]
    model: str
    created_at: float
    expires_at: float
    state: State
    spec: RowSpec | None = None
    completion: dict[str, Any] | None = None
    input_bytes: int = 0
    input_sha256: str = ""
    dim: int = 0
    made_by: str = ""
    disk_bytes: int = 0
    expected_tokens: float | None = None
    tokens: int = 0
    rows: int = 0
    tokens_per_second: float | None = None
    attempts: int = 0
    started_at: float | None = None
    ended_at: float | None = None
    error: dict[str, Any] | None = None
    runner: str = ""
    lease_until: float = 0.0
    retry_at: float = 0.0
    cancel: bool = False
    deleted: bool = False
    point: JobPoint | None = None
    events: tuple[Event, ...] = ()

    def index(self, name: str) -> tuple[str, ...]:
        """The keys of the indexes: by caller, by expiry and, for a job that is open, by arrival."""
        is_open = not self.ended or self.deleted
        keys = (self.caller_key(name), f"expiry/{moment(self.expires_at)}/{name}", self.open_key(name))
        return keys if is_open else keys[:-1]

    def sums(self) -> Mapping[str, int]:
        """The job's share of the sums: one job of its caller, and its bytes of disk."""
        return {f"usage/{self.caller}": 1, "usage": self.disk_bytes}

    def caller_key(self, name: str) -> str:
        """The key of the job among those of its caller."""
        return f"caller/{self.caller}/{moment(self.created_at)}/{name}"

    def open_key(self, name: str) -> str:
        """The key of the job among those that have not ended."""
        return f"open/{moment(self.created_at)}/{name}"

    @property
    def life_s(self) -> float:
        """The seconds that the job is kept from its end on, or before that from its beginning."""
        return self.expires_at - (self.ended_at or self.created_at)

    @property
    def ended(self) -> bool:
        """Return whether the job has ended, well or not."""
        return self.state in ENDED

    @property
    def last_event(self) -> int:
        """The number of the newest event."""
        return self.events[-1].number if self.events else 0


def with_event(record: JobRecord, kind: str, at: float, **data: Any) -> JobRecord:
    """The record with one more event. Of events of progress in a row only the newest is kept."""
    event = Event(record.last_event + 1, kind, at, data)
    before = record.events
    if kind == "progress" and before and before[-1].type == "progress":
        before = before[:-1]
    return changed(record, events=(*before, event)[-KEPT_EVENTS:])


def end_of(record: JobRecord, state: State, at: float, keep_seconds: float, **more: Any) -> JobRecord:
    """The record of a job that has ended, with the event that says so; it is kept for `keep_seconds`."""
    ended = changed(
        record,
        state=state,
        ended_at=at,
        expires_at=at + keep_seconds,
        runner="",
        lease_until=0.0,
        cancel=False,
        **more,
    )
    data = {"tokens": ended.tokens, "rows": ended.rows} | ({} if ended.error is None else {"error": ended.error})
    return with_event(ended, state, at, **data)


# ---- all of them ---------------------------------------------------------------------------------


class JobGone(NotFound):
    """The job is not in the catalogue any more."""


@dataclass(frozen=True)
class JobLimits:
    """The limits on jobs. Units: bytes, jobs, seconds."""

    disk_bytes: int
    per_caller: int
    lease_seconds: float


@final
class JobLedger(Ledger):
    """One transaction on jobs, which keeps to their limits."""

    def __init__(self, transaction: BufferedTransaction, limits: JobLimits, now: float) -> None:
        super().__init__(transaction, now)
        self._limits = limits

    def check(self, key: str, before: int, after: int) -> None:
        """Check a sum. Raises: ServiceError (429) when the caller has too many jobs, (507) when the disk is full."""
        if key == "usage":
            if after > self._limits.disk_bytes:
                raise ServiceError(
                    f"jobs may take {self._limits.disk_bytes} bytes of this service's disk, and {before} are taken; "
                    "delete jobs whose results you have, or wait for some to expire",
                    code=Code.DISK_FULL,
                )
        elif after > self._limits.per_caller:
            raise ServiceError(
                f"you have {before} jobs, which is the limit; delete some, or let them expire",
                code=Code.INSUFFICIENT_QUOTA,
                headers=NO_RETRY,
            )

    async def jobs(
        self,
        index: str,
        which: Callable[[JobRecord], bool],
        *,
        after: str = "",
        before: str = "~",
        limit: int | None = None,
    ) -> list[tuple[str, JobRecord]]:
        """The jobs of an index, in its order and between two of its keys, for which `which` is true."""
        jobs: list[tuple[str, JobRecord]] = []
        while page := [key for key, _ in await self.transaction.scan(index, PAGE, after)]:
            records = await self.find_all(JobRecord, map(name_in, page))
            for key, record in zip(page, records, strict=True):
                if key >= before or len(jobs) == limit:
                    return jobs
                if record is not None and which(record):
                    jobs.append((name_in(key), record))
            after = page[-1]
        return jobs


@final
class JobCatalogue:
    """Jobs over records that may be shared by several processes; every change is one transaction."""

    def __init__(self, records: Records, limits: JobLimits, clock: Callable[[], float] = time.time) -> None:
        self._records = records
        self._limits = limits
        self.clock = clock
        self.runner = f"{this_process()}/{secrets.token_hex(8)}"
        """A name of this process that no other has, and that tells others of this machine whether it lives."""

    async def close(self) -> None:
        """Close the records."""
        await self._records.close()

    @staticmethod
    async def open(address: str, folder: Path, limits: JobLimits) -> "JobCatalogue":
        """The catalogue in a file of this folder, or in Redis.

        Raises: StorageError, also for a folder with the files of jobs whose catalogue is lost; ConfigError for an
            address of another kind; MissingExtraError where redis-py is missing.
        """
        if address and not is_redis(address):
            raise ConfigError(f"jobs.address is {address!r}; needed is redis://HOST:PORT/DB, or nothing for a file")
        number = 0 if address or has_records(folder / CATALOGUE) else len(BlobFolder(folder / "files").names())
        if number:
            raise lost_catalogue(folder, f"the files of {number} jobs", CATALOGUE)
        return JobCatalogue(await open_records(address or str(folder), CATALOGUE, NAMESPACE), limits)

    @staticmethod
    @asynccontextmanager
    async def opened(settings: Settings) -> AsyncIterator["JobCatalogue"]:
        """The catalogue that the settings name, as long as the block runs. Raises: as `open`."""
        jobs = settings.jobs
        limits = JobLimits(jobs.disk_bytes, jobs.per_caller, jobs.lease_s)
        catalogue = await JobCatalogue.open(jobs.address, settings.data_dir / DataFolder.JOBS, limits)
        try:
            yield catalogue
        finally:
            await catalogue.close()

    async def _change(self, work: Callable[[JobLedger], Awaitable[T]]) -> T:
        try:
            return (await change(self._records, lambda t: JobLedger(t, self._limits, self.clock()), work))[0]
        except StorageError as error:
            raise ServiceError(str(error), code=Code.STORAGE_FAILED) from None

    async def add(self, record: JobRecord) -> str:
        """Add a new job, and return its id.

        Raises: ServiceError (429) when the caller has too many, (507) when the disk of jobs is full.
        """
        name = f"job_{secrets.token_urlsafe(24)}"
        await self._change(lambda ledger: ledger.save(name, record))
        return name

    async def get(self, name: str, caller: str | None = None) -> JobRecord:
        """A job; with `caller` only one of that caller's.

        Raises: NotFound.
        """
        record = await self._change(lambda ledger: ledger.find(JobRecord, name))
        if record is None or self._hidden(record) or (caller is not None and record.caller != caller):
            raise NotFound("there is no such job; it has expired, was deleted, or is another caller's", param="id")
        return record

    async def listed(self, caller: str, after: str, limit: int) -> list[tuple[str, JobRecord]]:
        """A caller's jobs in order of arrival, after the one with the id `after`."""

        async def read(ledger: JobLedger) -> list[tuple[str, JobRecord]]:
            last = await ledger.find(JobRecord, after) if after else None
            return await ledger.jobs(
                f"caller/{caller}/",
                lambda record: not self._hidden(record) and record.state != "receiving",
                after="" if last is None else last.caller_key(after),
                limit=limit,
            )

        return await self._change(read)

    async def change(self, name: str, work: Change) -> JobRecord:
        """Change a job, and return its new record.

        Raises: NotFound; ServiceError (507) when it would take more disk than there is for all jobs.
        """

        async def run(ledger: JobLedger) -> JobRecord:
            before = await ledger.find(JobRecord, name)
            if before is None:
                raise JobGone("there is no such job any more", param="id")
            after = work(before)
            await ledger.save(name, after, before)
            return after

        return await self._change(run)

    async def remove(self, name: str) -> None:
        """Forget a job."""

        async def run(ledger: JobLedger) -> None:
            record = await ledger.find(JobRecord, name)
            if record is not None:
                await ledger.forget(name, record)

        await self._change(run)

    async def claim(
        self, work: Change, wanted: Callable[[JobRecord], bool] = lambda _: True
    ) -> tuple[str, JobRecord] | None:
        """Become the runner of the job that has waited longest, changed by `work`; None where none waits.

        Jobs that are not `wanted` are left out. A job whose runner has died waits again.
        """

        async def run(ledger: JobLedger) -> tuple[str, JobRecord] | None:
            waits = await ledger.jobs("open/", lambda each: self._waits(each, ledger.now) and wanted(each), limit=1)
            for name, record in waits:
                lease = ledger.now + self._limits.lease_seconds
                mine = work(changed(record, runner=self.runner, lease_until=lease))
                await ledger.save(name, mine, record)
                return name, mine
            return None

        return await self._change(run)

    async def ahead(self, name: str, record: JobRecord) -> float:
        """The tokens to read of the same model's encodings that have waited longer; an unknown number counts as 0."""
        about = (record.model, "encoding")
        jobs = await self._change(
            lambda ledger: ledger.jobs(
                "open/", lambda other: (other.model, other.kind) == about, before=record.open_key(name), limit=PAGE
            )
        )
        return sum((max(0.0, (other.expected_tokens or 0) - other.tokens) for _, other in jobs), 0.0)

    async def lost(self, deletable_until: Callable[[float], float]) -> list[str]:
        """The jobs that may be removed: those that have expired or were deleted, and bodies whose receiver died.

        `deletable_until` gives, for a lifetime in seconds, the time by which jobs of that lifetime must have expired.
        """

        def expired(record: JobRecord) -> bool:
            return record.expires_at <= deletable_until(record.life_s)

        def abandoned(record: JobRecord) -> bool:
            unwanted = record.state == "receiving" or record.deleted
            return unwanted and self.dead(record, deletable_until(self._limits.lease_seconds))

        async def run(ledger: JobLedger) -> list[str]:
            jobs = await ledger.jobs("expiry/", expired, before=f"expiry/{moment(ledger.now)}/~")
            return list(dict.fromkeys(name for name, _ in [*jobs, *await ledger.jobs("open/", abandoned)]))

        return await self._change(run)

    def _hidden(self, record: JobRecord) -> bool:
        """Return whether the job is hidden from callers: it was deleted or has expired, and is removed later."""
        return record.deleted or record.expires_at <= self.clock()

    def dead(self, record: JobRecord, now: float) -> bool:
        """Return whether no process works on the job, as far as this one can know."""
        if not record.runner or record.lease_until <= now:
            return True
        return has_died(record.runner.rpartition("/")[0])

    def _waits(self, record: JobRecord, now: float) -> bool:
        if self._hidden(record) or record.retry_at > now:
            return False
        return record.state == "queued" or (record.state == "running" and self.dead(record, now))
