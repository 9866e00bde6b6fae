"""The part of a process that works on jobs: claims those that wait, keeps their progress, and hands them back."""

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any, final

from dist_attn.store import ExpiryGrace
from dist_attn.store.ledger import changed
from dist_attn_service.base.errors import Code, ServiceError, UnforeseenError, disk_code
from dist_attn_service.base.logs import Log, warn_of_jump
from dist_attn_service.base.settings import Settings
from dist_attn_service.base.tasks import beside, stop_tasks, task_group, unbroken
from dist_attn_service.engine.metrics import Metrics
from dist_attn_service.jobs.catalogue import JobGone, JobPoint, JobRecord, State, end_of, with_event
from dist_attn_service.jobs.files import JobStore

SWEEP_SECONDS = 30.0  # at most; a third of how long an ended job is kept, where that is less
PAST_SAVES = 20  # over which a job's own speed is taken
LONGEST_PAUSE = 30.0
LATER = (Code.ENGINE_NOT_READY, Code.ENGINE_UNREACHABLE, Code.OVERLOADED, Code.STOPPING, Code.STORAGE_FAILED)
"""The errors that a job waits out; all others end it."""


class Report:
    """The progress of the work on a job. `settle` makes rows safe on the disk and returns how many are.

    Work can go on from `point`, once the rows before it are safe; `save` writes all this to the record at once.
    """

    def __init__(self) -> None:
        self.save: Callable[[], Awaitable[None]] = _nothing
        self.point: JobPoint | None = None
        self.made_by = ""
        self.saving = asyncio.Lock()
        self.tokens: Callable[[], int] = lambda: 0
        self.expected: Callable[[], float | None] = lambda: None
        self.settle: Callable[[], int] | None = None
        self.bytes_per_row = 0
        self._past: deque[tuple[float, int]] = deque(maxlen=PAST_SAVES)

    def speed(self, now: float) -> float | None:
        """The tokens per second of late; None if no tokens were read."""
        self._past.append((now, self.tokens()))
        (then, before), (_, tokens) = self._past[0], self._past[-1]
        return (tokens - before) / (now - then) if now > then and tokens > before else None


async def _nothing() -> None:
    """Save nothing."""


Work = Callable[[str, JobRecord, Report], Awaitable[dict[str, Any]]]


class _Stop(Exception):
    """The job was cancelled or deleted, or another process runs it now."""


@final
class JobRunner:
    """A runner of up to `jobs.at_once` jobs of each of so many `models`, so that those that wait for one engine do not
    hold up the others'. `work_of` finds the work of a job, which returns the changes of its record at the end.
    """

    def __init__(
        self,
        settings: Settings,
        store: JobStore,
        work_of: Callable[[JobRecord], Work],
        log: Log,
        metrics: Metrics,
        monotonic: Callable[[], float] = time.monotonic,
        *,
        models: int = 1,
    ) -> None:
        self._settings = settings
        self._store = store
        self._catalogue = store.catalogue
        self._work_of = work_of
        self._places = models * settings.jobs.at_once
        self._log = log
        self._metrics = metrics
        self._grace = ExpiryGrace(settings.expired_seconds, store.catalogue.clock, monotonic)
        self._monotonic = monotonic
        self._wake = asyncio.Event()
        self._running: dict[str, asyncio.Task[None]] = {}
        self._of_models: Counter[str] = Counter()
        self._interrupted: set[str] = set()
        self._loop: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to look for jobs."""
        self._loop = asyncio.create_task(self._look(), name="jobs")

    async def stop(self) -> None:
        """Hand back the jobs that run: another process, or the next start of this one, goes on with them."""
        await stop_tasks(*self._running.values(), *([self._loop] if self._loop else []))

    def wake(self) -> None:
        """Look for a job that waits, without delay."""
        self._wake.set()

    def interrupt(self, name: str) -> None:
        """Stop a job that runs here, as its caller wants it no more."""
        task = self._running.get(name)
        if task is not None and name not in self._interrupted:
            self._interrupted.add(name)
            task.cancel()

    @property
    def running(self) -> int:
        """The number of jobs that run here."""
        return len(self._running)

    async def _look(self) -> None:
        swept, clock = -math.inf, self._monotonic
        while True:
            self._wake.clear()
            try:
                while self.running < self._places:
                    claimed = await self._catalogue.claim(self._begun, self._has_place)
                    if claimed is None:
                        break
                    self._begin(*claimed)
                if clock() - swept > min(SWEEP_SECONDS, self._settings.jobs.keep_s / 3):
                    swept = clock()
                    await self._sweep()
            except ServiceError as error:
                self._log.error("jobs cannot be looked at", error=str(error))
            with suppress(TimeoutError):
                async with asyncio.timeout(self._settings.jobs.look_s):
                    await self._wake.wait()

    async def _sweep(self) -> None:
        """Remove jobs that have expired, were deleted or lost their receiver, with their files."""
        self._grace.deletable_until()  # a jump of the clock is noticed in each round, also where nothing has expired
        lost = await self._catalogue.lost(self._grace.deletable_until)
        warn_of_jump(self._log, self._grace, "job")
        for name in lost:
            self.interrupt(name)
            await self._store.remove(name)

    def _has_place(self, record: JobRecord) -> bool:
        return self._of_models[record.model] < self._settings.jobs.at_once

    def _begun(self, record: JobRecord) -> JobRecord:
        now = self._catalogue.clock()
        again = changed(record, state="running", attempts=record.attempts + 1, started_at=record.started_at or now)
        return with_event(again, "started" if record.started_at is None else "resumed", now, rows=record.rows)

    def _begin(self, name: str, record: JobRecord) -> None:
        task = asyncio.create_task(self._run(name, record), name=f"job {name}")
        self._running[name] = task
        self._of_models[record.model] += 1

        def ended(_: asyncio.Task[None]) -> None:
            self._running.pop(name, None)
            self._of_models[record.model] -= 1
            self._interrupted.discard(name)
            self._wake.set()

        task.add_done_callback(ended)

    async def _run(self, name: str, record: JobRecord) -> None:
        """Run one job to its end, or until it is handed back; the catalogue says which."""
        try:
            await self._work(name, record)
        except (_Stop, JobGone):
            await self._stopped(name)
        except asyncio.CancelledError:
            if name in self._interrupted:
                await asyncio.shield(self._stopped(name))
                return
            await asyncio.shield(self._hand_back(name, 0.0))
            raise
        except ServiceError as error:
            if error.code in LATER:
                await self._hand_back(name, min(LONGEST_PAUSE, 0.5 * 2 ** min(record.attempts, 6)))
            else:
                await self._end(name, "failed", {"error": error.error_object()})
        except OSError as error:
            words = f"the files of this job cannot be read or written: {error.strerror}"
            await self._failed(name, ServiceError(words, code=disk_code(error)))
        except Exception as error:
            self._log.error("unexpected error in a job", job=name, exc_info=error)
            await self._failed(name, UnforeseenError())

    async def _work(self, name: str, record: JobRecord) -> None:
        report = Report()
        report.save = partial(self._save, name, report)
        async with task_group() as group:
            keeper = group.create_task(self._keep(name, report))
            changes = await self._work_of(record)(name, record, report)
            keeper.cancel()
        await self._end(name, "succeeded", changes)

    async def _keep(self, name: str, report: Report) -> None:
        """Save the progress every `jobs.save_s` seconds.

        Raises: _Stop when the job is not wanted here any more.
        """
        while True:
            await asyncio.sleep(self._settings.jobs.save_s)
            await self._save(name, report)

    async def _save(self, name: str, report: Report) -> None:
        """Write the progress to the record.

        Raises: _Stop when the job is not wanted here any more.
        """
        async with report.saving:
            rows = None if report.settle is None else await unbroken(beside(None, report.settle))
            await self._catalogue.change(name, lambda record: self._progress(record, report, rows))

    def _progress(self, record: JobRecord, report: Report, rows: int | None) -> JobRecord:
        now = self._catalogue.clock()
        if record.runner != self._catalogue.runner or record.cancel or record.deleted:
            raise _Stop
        rows = record.rows if rows is None else rows
        tokens, expected = report.tokens(), report.expected()
        moved = (tokens, rows) != (record.tokens, record.rows)
        record = changed(
            record,
            tokens=tokens,
            rows=rows,
            expected_tokens=record.expected_tokens if expected is None else expected,
            tokens_per_second=report.speed(now) or record.tokens_per_second,
            point=record.point if report.point is None or report.point.run.row > rows else report.point,
            made_by=report.made_by or record.made_by,
            disk_bytes=record.disk_bytes + max(0, rows - record.rows) * report.bytes_per_row,
            lease_until=now + self._settings.jobs.lease_s,
        )
        return with_event(record, "progress", now, tokens=tokens, rows=rows) if moved else record

    # ---- ends ----------------------------------------------------------------------------------

    async def _end(self, name: str, state: State, changes: dict[str, Any]) -> None:
        now, keep = self._catalogue.clock(), self._settings.jobs.keep_s
        point: JobPoint | None = None

        def ended(record: JobRecord) -> JobRecord:
            nonlocal point
            if record.runner != self._catalogue.runner:
                raise _Stop
            point = record.point
            return end_of(record, state, now, keep, point=None, **changes)

        try:
            record = await self._catalogue.change(name, ended)
        except (_Stop, JobGone):
            return
        except ServiceError as error:  # its result does not fit on the disk any more
            await self._failed(name, error)
            return
        await self._store.states.forget(record.caller, point)
        self._metrics.job_ended(record.kind, state)
        self._log.info("job", job=name, kind=record.kind, state=state, tokens=record.tokens, rows=record.rows)
        if record.deleted:
            await self._store.remove(name)

    async def _failed(self, name: str, error: ServiceError) -> None:
        with suppress(ServiceError):
            await self._end(name, "failed", {"error": error.error_object()})

    async def _stopped(self, name: str) -> None:
        """End a job that was cancelled or deleted; one that is gone or another process's is only left."""
        try:
            record = await self._catalogue.change(name, lambda record: record)
        except JobGone:
            await beside(None, self._store.files.delete_all, name)
            return
        except ServiceError as error:  # then its lease ends
            self._log.warning("a job could not be stopped in the catalogue", job=name, error=str(error))
            return
        if record.runner == self._catalogue.runner and (record.cancel or record.deleted):
            await self._end(name, "cancelled", {})

    async def _hand_back(self, name: str, pause: float) -> None:
        """Queue the job again, for any process to go on with after a pause of so many seconds."""
        now = self._catalogue.clock()

        def back(record: JobRecord) -> JobRecord:
            if record.runner != self._catalogue.runner or record.cancel or record.deleted:
                raise _Stop
            return changed(record, state="queued", runner="", lease_until=0.0, retry_at=now + pause)

        try:
            await self._catalogue.change(name, back)
        except (_Stop, JobGone):
            await self._stopped(name)
        except ServiceError as error:  # then its lease ends
            self._log.warning("a job could not be handed back", job=name, error=str(error))
