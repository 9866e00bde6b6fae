"""One document in the engine: pieces of tokens go in as fast as it gives credit, blocks of rows come out in order."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack

import msgspec
import numpy as np

from dist_attn.wire.messages import EncodingDone, Rows, RowSpec
from dist_attn_service.base.errors import EngineFailure
from dist_attn_service.encodings.rows import FLOATS_PER_CALL, ByteOffsets, RowBlock, row_block
from dist_attn_service.engine.stream import EngineStream
from dist_attn_service.engine.workload import DocumentLoad
from dist_attn_service.http.exchange import task_group
from dist_attn_service.text.tokenising import Piece, TextMark, TextMarks

__all__ = ["EncodingRun", "RunPoint", "Sink", "count_rows"]

Sink = Callable[[RowBlock], Awaitable[None]]
_NO_TOKENS = np.empty(0, dtype=np.int32)


def count_rows(spec: RowSpec, tokens: int) -> int:
    """How many rows a document of so many tokens has."""
    match spec.granularity:
        case "token":
            return tokens
        case "document":
            return min(tokens, 1)
        case _:
            return -(-tokens // spec.window)


class RunPoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the work on a document may begin again: at row `row`, which begins with token `tokens` and byte `byte`.

    The text is tokenised from `mark` on, which lies there or before it.
    """

    tokens: int = 0
    byte: int = 0
    row: int = 0
    mark: TextMark = TextMark()


class EncodingRun:
    """The work on one document. Rows before `first_row` are computed, as later ones need the state behind them, and
    not given to the sink. With `begin` the engine has the state there, and the text comes from its mark on.
    """

    def __init__(
        self,
        spec: RowSpec,
        dim: int,
        sink: Sink,
        *,
        first_row: int = 0,
        load: DocumentLoad,
        begin: RunPoint = RunPoint(),  # noqa: B008 - immutable
    ) -> None:
        self._spec = spec
        self._dim = dim
        self._sink = sink
        self._first_row = first_row
        self.load = load
        self.begin = begin
        mark = begin.mark
        self._offsets = ByteOffsets(spec, mark.tokens, mark.byte - mark.gap, (begin.tokens, begin.byte))
        self.marks: TextMarks | None = None  # of those who will begin again: they grow with the text
        self.rows = begin.row
        self.whole = False
        """Whether every token was handed to the engine."""

    @property
    def tokens(self) -> int:
        """Tokens of the document up to the last one that was handed to the engine."""
        return self._offsets.tokens

    @property
    def edge(self) -> tuple[int, int]:
        """Where the next row begins: its token and its byte."""
        return self._offsets.edge

    @property
    def bytes(self) -> int:
        """Their bytes of the document."""
        return self._offsets.bytes

    async def work(self, stream: EngineStream, pieces: AsyncIterator[Piece]) -> None:
        """Go through the whole document.

        Raises: ServiceError of the engine, of the pieces or of the sink.
        """
        with ExitStack() as until_done:
            async with task_group() as group:
                group.create_task(self._feed(stream, pieces, until_done))
                tokens, rows = await self._collect(stream)
        if (tokens, rows) != (self.tokens, self.rows):
            raise EngineFailure(
                f"the engine counted {tokens} tokens and {rows} rows where {self.tokens} and {self.rows} "
                "went through this service"
            )

    async def prepare(self, stream: EngineStream) -> None:
        """Give the engine what it begins with, before the first token."""

    async def take_other(self, stream: EngineStream, event: object) -> tuple[int, int] | None:
        """Take what is neither rows nor the end of an encoding; tokens and rows if it is an end.

        Raises: EngineFailure for what does not belong here.
        """
        raise EngineFailure(f"the engine answered an encoding with {event!r:.200}")

    async def _feed(self, stream: EngineStream, pieces: AsyncIterator[Piece], until_done: ExitStack) -> None:
        await self.prepare(stream)
        async for piece in pieces:
            known = max(0, self.begin.tokens - self._offsets.tokens)
            self._offsets.push(piece.byte_lengths)
            if self.marks is not None:
                self.marks.push(piece.mark)
            self.load.tokenised(len(piece.tokens), int(piece.byte_lengths.sum()))
            with self.load.waiting():
                await stream.send(piece.tokens[known:], final=False)
        until_done.enter_context(self.load.waiting())
        self.whole = True
        await stream.send(_NO_TOKENS, final=True)

    async def _collect(self, stream: EngineStream) -> tuple[int, int]:
        """Rows to the sink until the engine says that these were all: how many tokens and rows the document has."""
        while True:
            match await stream.next():
                case Rows() as rows:
                    await self._take(msgspec.structs.replace(rows, first_row=self.begin.row + rows.first_row))
                case EncodingDone(tokens=tokens, rows=count):
                    end = (tokens, count)
                    break
                case event:
                    if (found := await self.take_other(stream, event)) is not None:
                        end = found
                        break
        self.load.done(end[0])
        return end

    async def _take(self, event: Rows) -> None:
        total, dim = len(event.starts), self._dim
        if len(event.stops) != total or len(event.vectors) != 4 * dim * total:
            raise EngineFailure(
                f"the engine sent {len(event.vectors)} bytes for {total} rows of {dim} float32; "
                "is it serving another model?"
            )
        if total:
            self.load.done(event.stops[-1])
        step = max(1, FLOATS_PER_CALL // dim)
        for first in range(0, total, step):
            count = min(step, total - first)
            some = slice(first, first + count)
            spans = self._offsets.ranges(event.starts[some], event.stops[some])
            block = row_block(event, first, count, spans, dim).after(self._first_row)
            if len(block):
                await self._sink(block)
        self.rows += total
