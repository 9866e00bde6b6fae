"""A long document through the engine: body -> tokens -> controller -> rows, all at once and in bounded memory."""

import asyncio
import codecs
from collections.abc import AsyncIterator
from concurrent.futures import Executor
from dataclasses import dataclass, field

import numpy as np

from dist_attn.wire.messages import EncodingDone, Rows, RowSpec
from service.engine_port import EnginePort
from service.engine_stream import EngineStream
from service.engine_watch import EngineWatch
from service.errors import BadRequest, Code, EngineFailure, ServiceError, TooLarge
from service.exchange import RequestBody, ResponseWriter, task_group
from service.logs import RequestRecord
from service.metrics import Metrics
from service.rows import FLOATS_PER_CALL, ByteOffsets, format_rows
from service.schemas import EncodingSummary, Usage
from service.served_model import ServedModel
from service.settings import Settings
from service.spool import Spool, SpoolFactory
from service.tokenising import TokeniserPort

__all__ = ["DocumentService", "Source", "Utf8Check"]

NDJSON = "application/x-ndjson"
_NO_TOKENS = np.empty(0, dtype=np.int32)


class Utf8Check:
    """Checks a stream for valid UTF-8, wherever it is cut."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("strict")
        self._checked = 0

    def push(self, chunk: bytes, *, final: bool = False) -> None:
        """Check the next bytes.

        Raises: BadRequest naming the offset of the first byte that is wrong.
        """
        pending = len(self._decoder.getstate()[0])
        try:
            self._decoder.decode(chunk, final)
        except UnicodeDecodeError as error:
            raise BadRequest(
                f"byte {self._checked - pending + error.start} of the text is not valid UTF-8 ({error.reason}); "
                "send UTF-8, or any bytes as Content-Type: application/octet-stream",
                code=Code.INVALID_UTF8,
                param="input",
            ) from None
        self._checked += len(chunk)


@dataclass(frozen=True)
class Source:
    """Where the document comes from: the body that still arrives, or a text that came as JSON."""

    text: bytes | None = None
    check_utf8: bool = False


@dataclass
class _Document:
    """The moving parts of one encoding."""

    spec: RowSpec
    source: Source
    body: RequestBody
    inbox: Spool
    outbox: Spool
    record: RequestRecord
    offsets: ByteOffsets = field(init=False)
    rows: int = 0

    def __post_init__(self) -> None:
        self.offsets = ByteOffsets(self.spec)


class DocumentService:
    """Answers encodings; holds what they share, nothing of any one of them."""

    def __init__(
        self,
        settings: Settings,
        engine: EnginePort,
        watch: EngineWatch,
        tokeniser: TokeniserPort,
        model: ServedModel,
        spools: SpoolFactory,
        threads: Executor,
        metrics: Metrics,
    ) -> None:
        self._settings = settings
        self._engine = engine
        self._watch = watch
        self._tokeniser = tokeniser
        self._model = model
        self._spools = spools
        self._threads = threads
        self._metrics = metrics

    async def answer(
        self, spec: RowSpec, source: Source, body: RequestBody, writer: ResponseWriter, record: RequestRecord
    ) -> None:
        """Stream the rows of one document; the head goes out after the first bytes of the body came in.

        Raises: ServiceError as long as nothing has been sent (afterwards it is the last line of the
        answer), ClientGone when the client leaves.
        """
        settings = self._settings
        with (
            self._spools.open("input", settings.body_bytes) as inbox,
            self._spools.open("rows", settings.row_spool_bytes) as outbox,
        ):
            document = _Document(spec, source, body, inbox, outbox, record)
            async with task_group() as group:
                intake = group.create_task(self._take_body(document))
                await inbox.ready()
                if not inbox.waiting:
                    raise BadRequest("the body is empty; send a text", code=Code.EMPTY_INPUT, param="input")
                await self._watch.until_ready()
                with self._engine.open(spec, record.request_id) as stream:
                    await stream.admitted(settings.admission_seconds)
                    await writer.start(NDJSON)
                    delivery = group.create_task(self._deliver(outbox, writer))
                    outbox.end(await self._encode(document, stream))
                await delivery
                intake.cancel()

    async def _encode(self, document: _Document, stream: EngineStream) -> bytes:
        """Feed the engine and collect its rows; returns the last line."""
        try:
            async with task_group() as work:
                work.create_task(self._feed(document, stream))
                done = await self._collect(document, stream)
            if (done.tokens, done.rows) != (document.offsets.tokens, document.rows):
                raise EngineFailure(
                    f"the engine counted {done.tokens} tokens and {done.rows} rows where {document.offsets.tokens} "
                    f"and {document.rows} went through this service"
                )
        except ServiceError as error:
            document.inbox.fail(error)
            document.record.reason = str(error.code)
            return error.line()
        finally:
            tokens = document.offsets.tokens
            document.record.note(tokens=tokens, rows=document.rows, input_bytes=document.offsets.bytes)
            self._metrics.tokens("encoding", tokens)
        summary = EncodingSummary(
            tokens=tokens,
            rows=document.rows,
            model=self._model.id,
            usage=Usage(prompt_tokens=tokens, total_tokens=tokens),
        )
        return summary.model_dump_json().encode() + b"\n"

    async def _take_body(self, document: _Document) -> None:
        """Read the body to its end whether or not anybody takes the rows, then watch for the disconnect."""
        body, inbox = document.body, document.inbox
        try:
            if document.source.text is not None:
                await inbox.put(document.source.text)
            else:
                check = Utf8Check() if document.source.check_utf8 else None
                async for chunk in body.chunks():
                    if body.bytes > self._settings.body_bytes:
                        raise TooLarge(f"a document may have {self._settings.body_bytes} bytes")
                    if check is not None:
                        check.push(chunk)
                    await inbox.put(chunk)
                if check is not None:
                    check.push(b"", final=True)
            inbox.end()
        except ServiceError as error:
            inbox.fail(error)
        await body.until_gone()

    async def _feed(self, document: _Document, stream: EngineStream) -> None:
        """Tokens to the engine as fast as it gives credit."""
        async for piece in self._tokeniser.pieces(_blocks(document.inbox, self._settings.piece_bytes)):
            document.offsets.push(piece.byte_lengths)
            await stream.send(piece.tokens, final=False)
        await stream.send(_NO_TOKENS, final=True)

    async def _collect(self, document: _Document, stream: EngineStream) -> EncodingDone:
        """Rows from the engine, as text, to the outbox, until the engine says that these were all."""
        loop = asyncio.get_running_loop()
        while isinstance(event := await stream.next(), Rows):
            dim = self._model.hidden_size
            total = len(event.starts)
            if len(event.stops) != total or len(event.vectors) != 4 * dim * total:
                raise EngineFailure(
                    f"the engine sent {len(event.vectors)} bytes for {total} rows of {dim} float32; "
                    "is it serving another model?"
                )
            step = max(1, FLOATS_PER_CALL // dim)
            for first in range(0, total, step):
                count = min(step, total - first)
                some = slice(first, first + count)
                ranges = document.offsets.ranges(event.starts[some], event.stops[some])
                lines = await loop.run_in_executor(self._threads, format_rows, event, first, count, ranges, dim)
                await document.outbox.put(lines)
            document.rows += total
        if not isinstance(event, EncodingDone):
            raise EngineFailure("the engine answered an encoding with generated tokens")
        return event

    async def _deliver(self, outbox: Spool, writer: ResponseWriter) -> None:
        """Whole lines to the client, as fast as it takes them."""
        rest = b""
        while block := await outbox.read(self._settings.piece_bytes):
            whole, newline, tail = block.rpartition(b"\n")
            if newline:
                await writer.write(rest + whole + newline)
                rest = tail
            else:
                rest += block
        await writer.finish(rest)


async def _blocks(spool: Spool, count: int) -> AsyncIterator[bytes]:
    while block := await spool.read(count):
        yield block
