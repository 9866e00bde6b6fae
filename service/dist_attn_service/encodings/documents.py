"""A long document through the engine: body -> tokens -> controller -> rows, all at once and in bounded memory."""

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, field

import numpy as np

from dist_attn.text.documents import Section
from dist_attn.wire.messages import OpenWork, RowSpec
from dist_attn_api.types import EncodingSummary, Usage
from dist_attn_service.base.errors import BadRequest, Code, ServiceError, TooLarge
from dist_attn_service.base.logs import RequestRecord
from dist_attn_service.base.parsing import RequestTerms
from dist_attn_service.base.tasks import task_group, unbroken
from dist_attn_service.encodings.encoding_run import EncodingRun, RowBlock, count_rows, pieces_of
from dist_attn_service.encodings.formats import FORMATS, RowFormat, RowsAhead, make_format
from dist_attn_service.engine.run import ServiceContext
from dist_attn_service.engine.stream import EngineStream
from dist_attn_service.engine.workload import DocumentLoad
from dist_attn_service.http.exchange import RequestBody, ResponseWriter
from dist_attn_service.text.spool import Spool, SpoolFactory
from dist_attn_service.text.tokenising import Piece, TextMark

__all__ = ["DocumentService", "RowRequest", "DocumentSource"]

TOKEN_BYTES = 4


@dataclass(frozen=True)
class DocumentSource:
    """The source of a document: the body that still arrives, a text that came as JSON, or a stored file.

    `pieces` gives it once, as it comes, and checks it. Raises: ServiceError for what is no document, ClientGone.
    `size` is its length in bytes, where that is known; a document in a form may be a little shorter. `sections` are
    its pages or headings, there before its first piece.
    """

    pieces: AsyncGenerator[bytes]
    stored: bool = False
    size: int | None = None
    sections: list[Section] = field(default_factory=list)


@dataclass(frozen=True)
class RowRequest:
    """The rows that an answer has: their spec, the first of them, and the name of their format."""

    spec: RowSpec
    form: str = "ndjson"
    first_row: int = 0
    boundaries: Sequence[int] = ()
    terms: RequestTerms = field(default_factory=RequestTerms)


@dataclass
class _Document:
    """The moving parts of one encoding."""

    request: RowRequest
    source: DocumentSource
    body: RequestBody
    inbox: Spool
    outbox: Spool
    record: RequestRecord
    input_bytes: int | None = None  # where all of it was tokenised beforehand
    broken: bool = False  # the answer failed, in a format that can only break off


class DocumentService:
    """The service that answers encodings; holds what they share, nothing of any one of them."""

    def __init__(self, context: ServiceContext, spools: SpoolFactory) -> None:
        self._context = context
        self._spools = spools

    async def answer(
        self,
        request: RowRequest,
        source: DocumentSource,
        body: RequestBody,
        writer: ResponseWriter,
        record: RequestRecord,
    ) -> None:
        """Stream the rows of one document; the head goes out after the first bytes of the body came in.

        Raises: ServiceError as long as nothing has been sent (afterwards it is the last line of the
            answer, or the answer breaks off), ClientGone when the client leaves.
        """
        settings = self._context.settings
        with ExitStack() as spools:
            inbox = spools.enter_context(self._spools.open("input", settings.body_bytes))
            outbox = spools.enter_context(self._spools.open("rows", settings.row_spool_bytes))
            document = _Document(request, source, body, inbox, outbox, record)
            async with task_group() as group:
                intake = group.create_task(self._take_body(document))
                await inbox.ready()
                if not inbox.waiting:
                    raise BadRequest("the body is empty; send a text", code=Code.EMPTY_INPUT, param="input")
                pieces, count = await self._pieces(document, spools)
                model = self._context.model
                ahead = RowsAhead.of(
                    request.spec, model.id, model.hidden_size, request.first_row, count, source.sections
                )
                form = await self._context.beside(make_format, request.form, ahead)
                await self._context.watch.until_ready()
                work = OpenWork(record.request_id, rows=request.spec, terms=request.terms.for_engine())
                with self._context.workload.document(size=source.size) as load:
                    async with self._context.open(work) as stream:
                        await writer.start(form.media_type, form.length)
                        delivery = group.create_task(self._deliver(document, form, writer))
                        outbox.end(await self._encode(document, form, load, stream, pieces))
                await delivery
                intake.cancel()

    async def _pieces(self, document: _Document, spools: ExitStack) -> tuple[AsyncIterator[Piece], int | None]:
        """The document's tokens, and the number of its rows if the format needs that: then all of it is read first.

        Raises: TooLarge for more tokens than may wait for being counted.
        """
        size = self._context.settings.piece_bytes
        spec, given = document.request.spec, document.request.boundaries
        pieces = pieces_of(self._context.tokeniser, spec, _blocks(document.inbox, size), TextMark(), given)
        if not FORMATS[document.request.form].needs_count:
            return pieces, None
        limit = self._context.settings.npy_tokens
        spool = spools.enter_context(self._spools.open("tokens", TOKEN_BYTES * limit))
        count = marks = document.input_bytes = 0
        async for piece in pieces:
            count += len(piece.tokens)
            marks += int((piece.tokens < 0).sum())
            document.input_bytes += int(piece.byte_lengths.sum())
            if count > limit:
                raise TooLarge(
                    f"the document has more than {limit} tokens, which is this service's limit for npy, whose header "
                    "holds the number of rows; take format=arrow",
                    code=Code.CONTEXT_LENGTH_EXCEEDED,
                )
            await spool.put(piece.tokens.astype("<i4").tobytes())
        spool.end()
        return _spooled(spool, size), marks + min(count, 1) if spec.marked else count_rows(spec, count)

    async def _encode(
        self,
        document: _Document,
        form: RowFormat,
        load: DocumentLoad,
        stream: EngineStream,
        pieces: AsyncIterator[Piece],
    ) -> bytes:
        """Feed the engine and collect its rows; returns the last bytes, which say how it ended if they can."""
        outbox, record = document.outbox, document.record
        spec, dim, first = document.request.spec, self._context.model.hidden_size, document.request.first_row
        given = first  # the rows before this one are in the outbox, also where the run ended before it counted them

        async def format_and_put(block: RowBlock) -> None:
            nonlocal given
            await outbox.put(await self._context.beside(form.rows, block))
            given = block.first_row + len(block)

        async def put(block: RowBlock) -> None:
            await unbroken(format_and_put(block))  # also where the engine fails meanwhile: bytes of a format go on

        run = EncodingRun(spec, dim, put, load, first_row=first)
        try:
            await outbox.put(form.head())
            await run.work(stream, pieces)
            usage = Usage(prompt_tokens=run.tokens, total_tokens=run.tokens)
            return form.end(
                EncodingSummary(tokens=run.tokens, rows=run.rows, model=self._context.model.id, usage=usage)
            )
        except ServiceError as error:
            document.inbox.fail(error)
            record.reason = str(error.code)
            document.broken = form.breaks_off
            error.facts.setdefault("reached", {"next_row": given})
            return form.failed(error)
        finally:
            size = run.text_bytes if document.input_bytes is None else document.input_bytes
            record.note(tokens=run.tokens, rows=run.rows, input_bytes=size)
            self._context.metrics.tokens("encoding", run.tokens)

    async def _take_body(self, document: _Document) -> None:
        """Read the document to its end whether or not the client takes the rows, then watch for its disconnect. For a
        stored file the whole body of the request has come, so that both are done at once.
        """
        async with task_group() as group:
            reading = group.create_task(self._fill(document))
            if not document.source.stored:
                await reading
            await document.body.until_gone()

    async def _fill(self, document: _Document) -> None:
        inbox, stored, size = document.inbox, document.source.stored, 0
        try:
            async with aclosing(document.source.pieces) as chunks:
                async for chunk in chunks:
                    size += len(chunk)
                    if not stored and size > self._context.settings.body_bytes:
                        raise TooLarge(f"a document may have {self._context.settings.body_bytes} bytes")
                    await inbox.put(chunk)
                    if stored:  # no faster than it is tokenised, so that it does not go to disk a second time
                        await inbox.below(self._context.settings.spool_memory_bytes)
            inbox.end()
        except ServiceError as error:
            inbox.fail(error)

    async def _deliver(self, document: _Document, form: RowFormat, writer: ResponseWriter) -> None:
        """Send rows to the client as fast as it takes them; whole lines where an error would be one more."""
        rest, reached = b"", document.record.reached
        reached["next_row"] = document.request.first_row
        while block := await document.outbox.read(self._context.settings.piece_bytes):
            if form.breaks_off:
                await writer.write(block)
                continue
            whole, newline, tail = block.rpartition(b"\n")
            if newline:
                await writer.write(rest + whole + newline)
                reached["next_row"] += (rest + whole + newline).count(b"\n")
                rest = tail
            else:
                rest += block
        if document.broken:
            writer.break_off()
        else:
            await writer.finish(rest)


async def _blocks(spool: Spool, count: int) -> AsyncIterator[bytes]:
    while block := await spool.read(count):
        yield block


async def _spooled(spool: Spool, count: int) -> AsyncIterator[Piece]:
    """Read back the counted tokens, with no byte lengths: formats that need the count have no byte ranges."""
    rest = b""
    while block := await spool.read(count):
        data = rest + block
        whole = len(data) - len(data) % TOKEN_BYTES
        rest = data[whole:]
        tokens = np.frombuffer(data[:whole], dtype="<i4").astype(np.int32)
        yield Piece(tokens, np.zeros(len(tokens), dtype=np.int64))
