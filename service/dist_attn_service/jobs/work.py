"""The work of jobs: an encoding into the job's files, which goes on from states after a death, and a completion."""

import hashlib
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from math import lcm
from typing import Any, final

import msgspec
import numpy as np

from dist_attn.store.files import BlobFolder
from dist_attn.wire.messages import BeginState, Checkpoint, Keep, OpenWork, RowSpec
from dist_attn_api.types import CompletionUsage
from dist_attn_service.base.errors import Code, NotFound, ServiceError
from dist_attn_service.base.parsing import RequestTerms, terms_of
from dist_attn_service.base.tasks import beside, unbroken
from dist_attn_service.completions.prefixes import SPOILT
from dist_attn_service.completions.prepared import prepare
from dist_attn_service.completions.run import CompletionService, whole_completion
from dist_attn_service.encodings.encoding_run import EncodingRun, RowBlock, RunPoint, pieces_of
from dist_attn_service.engine.port import EngineKind
from dist_attn_service.engine.run import ServiceContext
from dist_attn_service.jobs.catalogue import JobPoint, JobRecord
from dist_attn_service.jobs.files import JobRowFile, JobStates
from dist_attn_service.jobs.runner import Report
from dist_attn_service.schemas.completions import CompletionRequest

BOUNDARY_BYTES = 8
CHECK_BYTES = 4 << 20  # read at once while the input is compared with what was received
UNUSABLE = (*SPOILT, Code.NOT_FOUND)
"""The errors for a state that work cannot go on from."""


@final
class EncodingWork:
    """The work of an encoding: it goes on from the last state kept; rows after that are made again, not written again.

    Models that draw no text or have no states that can be stored, and documents that are one row or whose rows end at
    marks in their text, begin with the first byte each time.
    """

    def __init__(self, context: ServiceContext, files: BlobFolder, states: JobStates) -> None:
        self._context = context
        self._files = files
        self._states = states

    async def __call__(self, name: str, record: JobRecord, report: Report) -> dict[str, object]:
        """Encode the rows after those that are there.

        Raises: ServiceError.
        """
        await self._context.watch.until_ready()
        boundaries = await self._checked_boundaries(name, record)
        report.point = record.point
        rows = JobRowFile(self._files.path(name), self._context.model.hidden_size)
        point, spec = record.point, record.spec
        assert spec is not None
        if point is not None and point.run.row <= record.rows and self._step(spec):
            try:
                if (begin := await self._states.begin(record.caller, point)) is not None:
                    return await self._encode(name, record, report, rows, point=point, begin=begin)
            except ServiceError as error:
                if error.code not in UNUSABLE:
                    raise
        return await self._encode(name, record, report, rows, boundaries)

    async def _checked_boundaries(self, name: str, record: JobRecord) -> Sequence[int]:
        """The byte offsets at which rows end, where they were sent.

        Raises: ServiceError (`input_lost`) where they, or the input, are not what the caller was told is kept.
        """
        size, digest = 0, hashlib.sha256()
        with suppress(FileNotFoundError):
            async for block in self._blocks(name, 0, CHECK_BYTES):
                size += len(block)
                await beside(None, digest.update, block)
        ends = b""
        with suppress(FileNotFoundError):
            ends = await beside(None, self._files.read, f"{name}/boundaries")
        digest.update(ends)
        # Jobs that an earlier version took in have no digest.
        if size != record.input_bytes or record.input_sha256 not in ("", digest.hexdigest()):
            others = " other" if size == record.input_bytes else ""
            raise ServiceError(
                f"the input of this job was lost or damaged: {record.input_bytes} bytes were sent, and {size}{others} "
                "bytes are on the disk; send it again as a new job",
                code=Code.INPUT_LOST,
            )
        return list(map(int, np.frombuffer(ends, dtype="<i8")))

    async def _encode(
        self,
        name: str,
        record: JobRecord,
        report: Report,
        rows: JobRowFile,
        boundaries: Sequence[int] = (),
        *,
        point: JobPoint | None = None,
        begin: BeginState | None = None,
    ) -> dict[str, object]:
        """Encode from the beginning, or from the state at `point`."""
        spec, at = record.spec, RunPoint() if point is None else point.run
        assert spec is not None
        like = None if point is None else await self._context.maker(record.caller, point.snapshot)
        kind = self._context.engine.kind(like)
        report.made_by = _made_by(kind, record)
        step, dim = self._step(spec), self._context.model.hidden_size
        terms = RequestTerms(holder=record.caller).for_engine()
        work = OpenWork(name, begin, spec, keep=Keep(step, end=True) if step else Keep(), terms=terms)

        async def put(block: RowBlock) -> None:
            await unbroken(beside(None, rows.append, block))

        async def keep(at: RunPoint | None, state: Checkpoint) -> None:
            if at is None:
                await self._states.discard(state)
            else:
                await self._keep(record, report, at, state)

        try:
            first = await unbroken(beside(None, rows.begin, record.rows))
            if first < at.row:
                raise NotFound(f"of the {at.row} rows of this job that were kept {first} are there")
            with self._context.workload.document(size=record.input_bytes, tokens=record.expected_tokens) as load:
                load.done_tokens = at.tokens
                run = EncodingRun(spec, dim, put, load, first, at)
                async with self._context.open(work, like, kind) as stream:
                    _tell(report, run, rows, record.input_bytes)
                    try:
                        blocks = self._blocks(name, at.mark.byte, self._context.settings.piece_bytes)
                        pieces = pieces_of(self._context.tokeniser, spec, blocks, at.mark, boundaries)
                        await run.work(stream, pieces, keep=keep if step else None, every=step)
                    finally:
                        self._context.metrics.tokens("encoding", max(0, run.tokens - at.tokens))
            safe = await unbroken(beside(None, rows.settle))
        finally:
            await unbroken(beside(None, rows.close))
        size = record.input_bytes + BOUNDARY_BYTES * len(boundaries) + safe * rows.bytes_per_row()
        return {"tokens": run.tokens, "rows": safe, "expected_tokens": float(run.tokens), "disk_bytes": size}

    async def _keep(self, record: JobRecord, report: Report, at: RunPoint, state: Checkpoint) -> None:
        """Keep a state for the rest of the job's life, and release the one before it."""
        seconds = max(0.0, record.expires_at - record.created_at)
        snapshot = await self._states.keep(record.caller, state, seconds)
        if snapshot is None:
            return
        before, report.point = report.point, JobPoint(at, snapshot)
        await report.save()
        if before is not None and before.snapshot != snapshot:
            await self._states.forget(record.caller, before)

    def _step(self, spec: RowSpec) -> int:
        """The tokens between two states, which lie on ends of blocks and of rows; 0: there are no states."""
        manifest = self._context.watch.states()
        if not self._context.model.writes or manifest is None:
            return 0  # an engine whose model writes nothing neither takes nor gives states
        if spec.granularity == "document" or spec.marked:
            return 0
        unit = lcm(manifest.computed.chunk_tokens, spec.window if spec.granularity == "window" else 1)
        return -(-self._context.settings.checkpoint_tokens // unit) * unit

    async def _blocks(self, name: str, start: int, count: int) -> AsyncIterator[bytes]:
        while block := await beside(None, self._files.read, f"{name}/input", start, count):
            start += len(block)
            yield block


def _made_by(kind: EngineKind | None, record: JobRecord) -> str:
    """The digest of the model that is to make the rows.

    Raises: ServiceError (`state_mismatch`) where another one has made the rows that are there.
    """
    model = kind.manifest.model if kind and kind.manifest else None
    digest = hashlib.sha256(msgspec.json.encode(model)).hexdigest() if model else ""
    if model and record.rows and record.made_by not in ("", digest):
        raise ServiceError(
            f"the first {record.rows} rows of this job were made by another model than revision {model.revision}, "
            "which is served now; send the input again as a new job",
            code=Code.STATE_MISMATCH,
        )
    return digest


def _tell(report: Report, run: EncodingRun, rows: JobRowFile, input_bytes: int) -> None:
    """Let a report tell the progress of a run."""
    report.tokens = lambda: run.load.done_tokens
    report.expected = lambda: run.tokens * input_bytes / run.text_bytes if run.text_bytes else None
    report.settle, report.bytes_per_row = rows.settle, rows.bytes_per_row()


@final
class CompletionWork:
    """The work of a completion, drawn from its beginning each time; its seed is fixed, so it is the same each time."""

    def __init__(self, context: ServiceContext, files: BlobFolder, completions: CompletionService) -> None:
        self._context = context
        self._files = files
        self._completions = completions

    async def __call__(self, name: str, record: JobRecord, report: Report) -> dict[str, Any]:
        """Draw the completion and keep it.

        Raises: ServiceError.
        """
        drawn = 0

        def draw(usage: CompletionUsage) -> None:
            nonlocal drawn
            drawn = usage.completion_tokens

        report.tokens = lambda: drawn
        request = CompletionRequest.model_validate(record.completion)
        prepared = await prepare(self._context, request, terms_of(request, {}, holder=record.caller))
        counted = self._context.metrics.completion
        choices, usage = await self._completions.gather(prepared, name, counted=counted, drawn=draw)
        result = msgspec.json.encode(whole_completion(prepared, self._context.model.id, choices, usage))
        await beside(None, self._files.put, f"{name}/result", result)
        return {"tokens": drawn, "disk_bytes": record.disk_bytes + len(result)}
