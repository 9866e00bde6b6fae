"""The work of each kind of job: an encoding from a file into files, a completion into one."""

import asyncio
import os
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any, final

from service.encoding_run import EncodingRun
from service.engine_port import EnginePort
from service.engine_watch import EngineWatch
from service.errors import BadRequest, NotFound, ServiceError
from service.jobs.files import JobFiles, unbroken
from service.jobs.record import JobRecord
from service.jobs.runner import Complete, Report
from service.metrics import Metrics
from service.rows import RowBlock
from service.served_model import ServedModel
from service.settings import Settings
from service.tokenising import TokeniserPort
from service.workload import Workload

__all__ = ["CompletionWork", "EncodingWork"]


def check_model(record: JobRecord, model: ServedModel) -> None:
    """Raises: BadRequest when the job was handed in for another model than the one that is served now."""
    if record.model != model.identity:
        raise BadRequest(
            f"this job was handed in for the model {record.model}; served is {model.identity} now: send it again",
            param="model",
        )


@final
class EncodingWork:
    """Reads the input from its first byte, as the state behind the rows that are there is needed; keeps these rows."""

    def __init__(
        self,
        settings: Settings,
        engine: EnginePort,
        watch: EngineWatch,
        tokeniser: TokeniserPort,
        model: ServedModel,
        files: JobFiles,
        workload: Workload,
        metrics: Metrics,
    ) -> None:
        self._settings = settings
        self._engine = engine
        self._watch = watch
        self._tokeniser = tokeniser
        self._model = model
        self._files = files
        self._workload = workload
        self._metrics = metrics

    async def __call__(self, name: str, record: JobRecord, report: Report) -> dict[str, Any]:
        """Go on with the rows behind those that are there.

        Raises: ServiceError.
        """
        check_model(record, self._model)
        assert record.spec is not None
        await self._watch.until_ready()
        rows = self._files.rows(name, self._model.hidden_size)
        if not await asyncio.to_thread(self._files.input(name).is_file):
            raise _gone()

        async def put(block: RowBlock) -> None:
            await unbroken(partial(rows.append, block))

        try:
            first = await unbroken(partial(rows.begin, record.rows))
            with (
                self._workload.document(size=record.input_bytes, tokens=record.expected_tokens) as load,
                self._engine.open(record.spec, name) as stream,
            ):
                await stream.admitted(self._settings.admission_seconds)
                run = EncodingRun(record.spec, self._model.hidden_size, put, first_row=first, load=load)
                report.tokens = lambda: load.done_tokens
                report.expected = lambda: run.tokens * record.input_bytes / run.bytes if run.bytes else None
                report.settle, report.bytes_per_row = rows.settle, rows.bytes_per_row()
                try:
                    await run.work(stream, self._tokeniser.pieces(self._blocks(name)))
                finally:
                    self._metrics.tokens("encoding", run.tokens)
            safe = await unbroken(rows.settle)
        finally:
            await unbroken(rows.close)
        size = record.input_bytes + safe * rows.bytes_per_row()
        return {"tokens": run.tokens, "rows": safe, "expected_tokens": float(run.tokens), "disk_bytes": size}

    async def _blocks(self, name: str) -> AsyncIterator[bytes]:
        start, count = 0, self._settings.piece_bytes
        while block := await asyncio.to_thread(self._files.read_input, name, start, count):
            start += len(block)
            yield block


@final
class CompletionWork:
    """Draws a completion, from its beginning each time; its seed is settled, so it is the same each time."""

    def __init__(self, files: JobFiles, model: ServedModel, complete: Complete) -> None:
        self._files = files
        self._model = model
        self._complete = complete

    async def __call__(self, name: str, record: JobRecord, report: Report) -> dict[str, Any]:
        """Draw it and keep it.

        Raises: ServiceError.
        """
        check_model(record, self._model)
        assert record.completion is not None
        drawn = 0

        def draw(count: int) -> None:
            nonlocal drawn
            drawn = count

        report.tokens = lambda: drawn
        result = await self._complete(record.completion, name, draw)
        await asyncio.to_thread(self._files.make, name)
        await asyncio.to_thread(_write, self._files.result(name), result)
        return {"tokens": drawn, "disk_bytes": record.disk_bytes + len(result)}


def _gone() -> ServiceError:
    return NotFound("what was sent with this job is no longer on the disk; send it again as a new job")


def _write(path: Path, data: bytes) -> None:
    beside = path.with_name("result.writing")
    with beside.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
