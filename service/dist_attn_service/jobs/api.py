"""Jobs as their callers use them: hand one in, look at it, follow its events, cancel and delete it."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, suppress
from functools import partial
from typing import Any, Literal, final

import msgspec
import numpy as np

from dist_attn.settings import DataFolder
from dist_attn.store.files import BlobFolder
from dist_attn.store.ledger import changed
from dist_attn.wire.messages import RowSpec
from dist_attn_api.types import Job, JobProgress
from dist_attn_service.base.errors import BadRequest, Code, NotFound, ServiceError, TooLarge, disk_code
from dist_attn_service.base.tasks import beside, unbroken
from dist_attn_service.completions.run import CompletionService
from dist_attn_service.encodings.documents import DocumentSource
from dist_attn_service.engine.run import ServiceContext
from dist_attn_service.jobs.catalogue import Event, JobCatalogue, JobRecord, end_of, with_event
from dist_attn_service.jobs.files import JobStates, JobStore
from dist_attn_service.jobs.results import JobResults
from dist_attn_service.jobs.runner import JobRunner, Work
from dist_attn_service.jobs.work import CompletionWork, EncodingWork

STEP_BYTES = 8 << 20  # of disk, taken at once while a body of unknown length comes in
WRITE_BYTES = 1 << 20
RENEW_SECONDS = 5.0


@final
class JobServices:
    """The service of jobs, except for their `results`.

    `runner` is that of this process, which learns at once what others see later; nothing runs before it is started.
    `workers` are the served models, each with its service of completions.
    """

    def __init__(self, catalogue: JobCatalogue, workers: Sequence[tuple[ServiceContext, CompletionService]]) -> None:
        contexts = {context.model.identity: context for context, _ in workers}
        first = workers[0][0]
        settings = first.settings
        files, states = BlobFolder(settings.data_dir / DataFolder.JOBS / "files"), JobStates(first.store, first.log)
        works: dict[tuple[str, str], Work] = {}
        for context, completions in workers:
            works[context.model.identity, "encoding"] = EncodingWork(context, files, states)
            works[context.model.identity, "completion"] = CompletionWork(context, files, completions)

        def work_of(record: JobRecord) -> Work:
            """Find the work of a job. Raises: BadRequest for a model that is not served any more."""
            if record.model not in contexts:
                raise BadRequest(
                    f"this job was handed in for the model {record.model}; served is {' and '.join(contexts)} now: "
                    "send it again",
                    param="model",
                )
            return works[record.model, record.kind]

        self._settings = settings
        self._catalogue = catalogue
        self._contexts = contexts
        self._store = JobStore(catalogue, files, states)
        self.results = JobResults(settings, self._store, contexts, first.threads)
        self.runner = JobRunner(settings, self._store, work_of, first.log, first.metrics, models=len(contexts))

    # ---- handing in ----------------------------------------------------------------------------

    async def encoding(
        self,
        context: ServiceContext,
        caller: str,
        spec: RowSpec,
        source: DocumentSource,
        boundaries: Sequence[int] = (),
    ) -> tuple[str, JobRecord]:
        """A new job that encodes a document with the model of `context`.

        `boundaries` are the byte offsets at which rows end, where the granularity of `spec` says so.

        When this returns, all of it is on the disk, where a power cut leaves it.

        Raises: ServiceError for an empty body, too many jobs or a full disk, and what the pieces raise; then there is
            no job.
        """
        lease = self._settings.body_idle_seconds + self._settings.jobs.lease_s
        until, runner = self._catalogue.clock() + lease, self._catalogue.runner
        receiving = {"state": "receiving", "disk_bytes": source.size or 0, "runner": runner, "lease_until": until}
        record = self._new(context, caller, "encoding", spec=spec, dim=context.model.hidden_size, **receiving)
        name = await self._catalogue.add(record)
        try:
            ends = np.array(boundaries, dtype="<i8").tobytes()
            total, sha256 = await self._receive(name, source, ends, lease)
            if not total:
                raise BadRequest("the body is empty; send a text", code=Code.EMPTY_INPUT, param="input")
            await unbroken(beside(None, self._store.files.sync, f"{name}/input"))
            return name, await self._enqueue(context, name, total, total + len(ends), sha256)
        except BaseException as error:
            await asyncio.shield(self._store.remove(name))
            if isinstance(error, OSError):
                words = f"what was sent could not be written to the disk: {error.strerror}; nothing of it is kept"
                raise ServiceError(words, code=disk_code(error)) from None
            raise

    async def completion(self, context: ServiceContext, caller: str, request: dict[str, Any]) -> tuple[str, JobRecord]:
        """A new job that draws a completion from the model of `context`.

        Raises: ServiceError for too many jobs or a full disk.
        """
        size = len(msgspec.json.encode(request))
        record = self._new(context, caller, "completion", completion=request, disk_bytes=size)
        name = await self._catalogue.add(with_event(record, "created", self._catalogue.clock()))
        self.runner.wake()
        return name, await self._catalogue.get(name)

    def _new(
        self, context: ServiceContext, caller: str, kind: Literal["encoding", "completion"], **values: Any
    ) -> JobRecord:
        now = self._catalogue.clock()
        return JobRecord(
            caller=caller,
            kind=kind,
            model=context.model.identity,
            created_at=now,
            expires_at=now + self._settings.jobs.life_s,
            **{"state": "queued", **values},
        )

    async def _receive(self, name: str, source: DocumentSource, ends: bytes, lease: float) -> tuple[int, str]:
        """Write a document and its rows' ends to the job's files; return its length, and the SHA-256 of both in hex."""
        place = f"{name}/input"
        await beside(None, self._store.files.append, place, b"")
        total, reserved, waiting = 0, source.size or 0, bytearray()
        renewed, digest = self._catalogue.clock(), hashlib.sha256()

        def write(data: bytes) -> None:
            digest.update(data)
            self._store.files.append(place, data)

        async with aclosing(source.pieces) as chunks:
            async for chunk in chunks:
                total += len(chunk)
                if total > self._settings.body_bytes:
                    raise TooLarge(f"a document may have {self._settings.body_bytes} bytes")
                waiting += chunk
                now = self._catalogue.clock()
                if total > reserved or now - renewed > RENEW_SECONDS:
                    reserved, renewed = max(reserved, -(-total // STEP_BYTES) * STEP_BYTES), now
                    await self._catalogue.change(name, partial(changed, disk_bytes=reserved, lease_until=now + lease))
                if len(waiting) >= WRITE_BYTES:
                    await unbroken(beside(None, write, bytes(waiting)))
                    waiting.clear()
        await unbroken(beside(None, write, bytes(waiting)))
        if source.sections:
            told = msgspec.json.encode(source.sections)
            await unbroken(beside(None, self._store.files.put, f"{name}/sections", told))
        if ends:
            digest.update(ends)
            await unbroken(beside(None, self._store.files.put, f"{name}/boundaries", ends))
        return total, digest.hexdigest()

    async def _enqueue(self, context: ServiceContext, name: str, total: int, on_disk: int, sha256: str) -> JobRecord:
        ratio = context.workload.ratio.measured()
        expected = None if ratio is None else total * ratio.tokens_per_byte
        now = self._catalogue.clock()

        def queued(record: JobRecord) -> JobRecord:
            received = {
                "input_bytes": total,
                "input_sha256": sha256,
                "disk_bytes": on_disk,
                "expected_tokens": expected,
            }
            record = changed(record, state="queued", runner="", lease_until=0.0, **received)
            return with_event(record, "created", now)

        record = await self._catalogue.change(name, queued)
        self.runner.wake()
        return record

    # ---- looking -------------------------------------------------------------------------------

    async def get(self, caller: str, name: str) -> JobRecord:
        """A job of this caller.

        Raises: NotFound.
        """
        return await self._catalogue.get(name, caller)

    async def listed(self, caller: str, after: str, limit: int) -> list[tuple[str, JobRecord]]:
        """A caller's jobs in order of arrival."""
        return await self._catalogue.listed(caller, after, limit)

    async def view(self, name: str, record: JobRecord) -> Job:
        """A job as its caller sees it."""
        expected = record.expected_tokens
        if record.state == "succeeded":
            expected = record.tokens
        remaining = None if expected is None else max(0.0, expected - record.tokens)
        fraction = min(1.0, record.tokens / expected) if expected else float(record.state == "succeeded")
        progress = JobProgress(
            tokens=record.tokens,
            expected_tokens=None if expected is None else round(expected),
            rows=record.rows,
            fraction=round(fraction, 4),
            tokens_per_second=record.tokens_per_second,
            eta_seconds=None if remaining is None else await self._eta(name, record, remaining),
        )
        return Job(
            id=name,
            kind=record.kind,
            model=record.model.rpartition("@")[0],
            status="queued" if record.state == "receiving" else record.state,
            created_at=record.created_at,
            started_at=record.started_at,
            ended_at=record.ended_at,
            expires_at=record.expires_at,
            cancel_requested=record.cancel and not record.ended,
            attempts=record.attempts,
            input_bytes=record.input_bytes,
            progress=progress,
            error=record.error,
            last_event=record.last_event,
        )

    async def _eta(self, name: str, record: JobRecord, remaining: float) -> float | None:
        """The seconds to a job's end, by its own speed while it runs, else by recent measures; None: unknown."""
        if record.ended:
            return 0.0
        context = self._contexts.get(record.model)
        speed = None if context is None else context.workload.speed.measured()
        if record.state == "running" and record.tokens_per_second:
            return round(remaining / record.tokens_per_second, 1)
        if speed is None or record.kind != "encoding":
            return None
        ahead = await self._catalogue.ahead(name, record) if record.state == "queued" else 0.0
        return round((ahead + remaining) / speed.tokens_per_second, 1)

    async def events(self, caller: str, name: str, after: int, ping_seconds: float) -> AsyncIterator[Event | None]:
        """The events after number `after`, and those to come, until the job has ended; None after a time without any.

        Raises: NotFound, also when it is deleted meanwhile.
        """
        clock = asyncio.get_running_loop().time
        spoke = clock()
        while True:
            record = await self._catalogue.get(name, caller)
            for event in record.events:
                if event.number > after:
                    after, spoke = event.number, clock()
                    yield event
            if record.ended:
                return
            if clock() - spoke > ping_seconds:
                spoke = clock()
                yield None
            await asyncio.sleep(self._settings.jobs.look_s)

    # ---- ending --------------------------------------------------------------------------------

    async def cancel(self, caller: str, name: str) -> JobRecord:
        """End a job: at once where it waits or runs here, within a second or so where another process runs it.

        A job that has ended stays as it is.
        """
        await self._catalogue.get(name, caller)
        record = await self._catalogue.change(name, self._cancelled)
        self.runner.interrupt(name)
        if record.ended:
            await self._store.states.forget(caller, record.point)  # the process that runs a job does so at its end
        return record

    async def delete(self, caller: str, name: str) -> None:
        """Cancel a job if need be, and forget it."""
        await self._catalogue.get(name, caller)
        record = await self._catalogue.change(name, lambda r: changed(self._cancelled(r), deleted=True))
        self.runner.interrupt(name)
        if not record.runner:
            await self._store.states.forget(caller, record.point)
            with suppress(NotFound, ServiceError):
                await self._store.remove(name)

    def _cancelled(self, record: JobRecord) -> JobRecord:
        if record.ended:
            return record
        if record.state == "queued":
            return end_of(record, "cancelled", self._catalogue.clock(), self._settings.jobs.keep_s)
        return changed(record, cancel=True)
