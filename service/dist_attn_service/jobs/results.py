"""The results of jobs, in any format: rows that are there, rows that still come, or a part of an npy file."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass
from typing import ParamSpec, TypeVar, final

import msgspec

from dist_attn.text.documents import Section
from dist_attn_api.types import EncodingSummary, Usage
from dist_attn_service.base.errors import NO_RETRY, Code, NotFound, ServiceError
from dist_attn_service.base.settings import Settings
from dist_attn_service.base.tasks import beside
from dist_attn_service.encodings.encoding_run import FLOATS_PER_CALL, RowBlock
from dist_attn_service.encodings.formats import FORMATS, RowFormat, RowsAhead, make_format
from dist_attn_service.engine.run import ServiceContext
from dist_attn_service.http.exchange import ResponseWriter, byte_range
from dist_attn_service.jobs.catalogue import JobRecord
from dist_attn_service.jobs.files import JobRowFile, JobStore

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class ResultWanted:
    """Rows of a job: the format's name, the first row, and of an npy file perhaps only the bytes of a `Range`."""

    form: str
    first_row: int = 0
    range: str | None = None


def not_done(record: JobRecord) -> ServiceError:
    """The refusal of a result that there is only at the end of a job."""
    headers = dict(NO_RETRY)
    if record.error is not None:
        words = f"this job failed: {record.error.get('message')}"
    elif record.ended:
        words = f"this job is {record.state}"
    else:
        words = f"this job is {record.state}; ask again when it has ended, or follow its events"
        headers["retry-after"] = "5"
    return ServiceError(words, code=Code.JOB_NOT_DONE, headers=headers)


@final
class JobResults:
    """A writer of results, with what they share. `contexts` has those of the served models, by identity."""

    def __init__(
        self, settings: Settings, store: JobStore, contexts: Mapping[str, ServiceContext], threads: Executor
    ) -> None:
        self._settings = settings
        self._catalogue = store.catalogue
        self._files = store.files
        self._contexts = contexts
        self._threads = threads

    async def completion(self, name: str, record: JobRecord) -> bytes:
        """A completion's JSON.

        Raises: ServiceError (409) before it is done, NotFound when it is deleted meanwhile.
        """
        if record.state != "succeeded":
            raise not_done(record)
        return await self._read(self._files.read, f"{name}/result")

    async def rows(self, name: str, record: JobRecord, wanted: ResultWanted, writer: ResponseWriter) -> None:
        """Write the rows that are there and, while the job goes on, those that come, to its end.

        The answer for a job that failed ends like that of an encoding that fails.

        Raises: ServiceError before the answer has begun: (409) for npy while the job is not done, (416) for a part that
            is not there.
        """
        if FORMATS[wanted.form].needs_count and record.state != "succeeded":
            raise not_done(record)
        assert record.spec is not None
        count = record.rows if record.state == "succeeded" else None
        sections = await beside(self._threads, self.sections, name)
        model, dim = self._model_of(record), self._dim_of(record)
        ahead = RowsAhead.of(record.spec, model, dim, wanted.first_row, count, sections)
        form = await beside(self._threads, make_format, wanted.form, ahead)
        if FORMATS[wanted.form].needs_count:
            await self._npy(name, record, wanted, form, writer)
            return
        await writer.start(form.media_type)
        await writer.write(await beside(self._threads, form.head))
        try:
            async for block in self._follow(name, record, wanted.first_row):
                await writer.write(await beside(self._threads, form.rows, block))
            ended = await self._catalogue.get(name, record.caller)
            if ended.state != "succeeded":
                raise _as_error(ended)
        except ServiceError as error:
            await writer.write(await beside(self._threads, form.failed, error))
            if form.breaks_off:
                writer.break_off()
            else:
                await writer.finish()
            return
        usage = Usage(prompt_tokens=ended.tokens, total_tokens=ended.tokens)
        summary = EncodingSummary(tokens=ended.tokens, rows=ended.rows, model=self._model_of(ended), usage=usage)
        await writer.finish(await beside(self._threads, form.end, summary))

    def sections(self, name: str) -> list[Section]:
        """The pages or headings of a job's document. Blocks."""
        with suppress(FileNotFoundError):
            return msgspec.json.decode(self._files.read(f"{name}/sections"), type=list[Section])
        return []

    def kept(self, name: str, record: JobRecord) -> tuple[Callable[[int, int], RowBlock], Callable[[int, int], bytes]]:
        """Two functions, which block: rows [first, first + count) that are safe, and bytes [start, stop) of the input.

        They raise FileNotFoundError when the job is deleted meanwhile.
        """
        rows = JobRowFile(self._files.path(name), self._contexts[record.model].model.hidden_size)
        return rows.read, lambda start, stop: self._files.read(f"{name}/input", start, stop - start)

    async def _npy(
        self, name: str, record: JobRecord, wanted: ResultWanted, form: RowFormat, writer: ResponseWriter
    ) -> None:
        """Write the npy file, or the part of it that is asked for."""
        head, total = form.head(), form.length or 0
        tag = {"accept-ranges": "bytes", "etag": f'"{name}.{wanted.first_row}"'}
        part = byte_range(wanted.range, total)
        begin, end = part or (0, total)
        if part is not None:
            tag["content-range"] = f"bytes {begin}-{end - 1}/{total}"
        await writer.start(form.media_type, end - begin, tag, 200 if part is None else 206)
        if begin < len(head):
            await writer.write(head[begin:end])
        dim = self._dim_of(record)
        row_bytes = 4 * dim
        at, stop = max(0, begin - len(head)), max(0, end - len(head))
        file = JobRowFile(self._files.path(name), dim)
        while at < stop:
            first = at // row_bytes
            count = min(_step(dim), -(-stop // row_bytes) - first)
            block = await self._read(file.read, wanted.first_row + first, count)
            data = block.vectors_ND.tobytes()[at - first * row_bytes : stop - first * row_bytes]
            await writer.write(data)
            at += len(data)
        await writer.finish()

    async def _follow(self, name: str, record: JobRecord, at: int) -> AsyncIterator[RowBlock]:
        """Rows from `at` on, as they become safe, until the job has ended."""
        dim = self._dim_of(record)
        file = JobRowFile(self._files.path(name), dim)
        while True:
            record = await self._catalogue.get(name, record.caller)
            while at < record.rows:
                count = min(_step(dim), record.rows - at)
                yield await self._read(file.read, at, count)
                at += count
            if record.ended:
                return
            await asyncio.sleep(self._settings.jobs.look_s)

    def _model_of(self, record: JobRecord) -> str:
        """The name of a job's model, as answers have it."""
        context = self._contexts.get(record.model)
        return record.model.rpartition("@")[0] if context is None else context.model.id

    def _dim_of(self, record: JobRecord) -> int:
        """The numbers of a row; in records of an earlier version, which lack it, the width of the model served now."""
        return record.dim or self._contexts.get(record.model, next(iter(self._contexts.values()))).model.hidden_size

    async def _read(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return await beside(self._threads, work, *args, **kwargs)
        except FileNotFoundError:
            raise NotFound("this job was deleted", param="id") from None


def _step(dim: int) -> int:
    """The number of rows to read at once."""
    return max(1, FLOATS_PER_CALL // dim)


def _as_error(record: JobRecord) -> ServiceError:
    """The error of a job that did not succeed, as it was."""
    if record.error is None:
        return ServiceError("this job was cancelled", code=Code.JOB_NOT_DONE)
    code = Code.of(record.error.get("code")) or Code.ENGINE_FAILED
    return ServiceError(str(record.error.get("message")), code=code, status=500)
