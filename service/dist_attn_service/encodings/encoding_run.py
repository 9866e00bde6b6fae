"""One document in the engine: pieces of tokens go in as fast as it gives credit, blocks of rows come out in order."""

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable

import msgspec

from dist_attn.text.base import TokenArray
from dist_attn.wire.messages import Rows, RowSpec
from dist_attn_service.base.errors import EngineFailure
from dist_attn_service.encodings.rows import FLOATS_PER_CALL, ByteOffsets, RowBlock, row_block
from dist_attn_service.engine.run import EngineRun
from dist_attn_service.engine.stream import EngineStream
from dist_attn_service.engine.workload import DocumentLoad
from dist_attn_service.text.tokenising import Piece, TextMark, TextMarks

__all__ = ["EncodingRun", "RunPoint", "Sink", "count_rows"]

Sink = Callable[[RowBlock], Awaitable[None]]


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


Keep = Callable[[RunPoint, AsyncIterator[bytes]], Awaitable[None]]


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
        self._marks: TextMarks | None = None  # of those who will begin again: they grow with the text
        self.rows = begin.row

    @property
    def tokens(self) -> int:
        """Tokens of the document up to the last one that was handed to the engine."""
        return self._offsets.tokens

    @property
    def text_bytes(self) -> int:
        """Their bytes of the document."""
        return self._offsets.bytes

    async def work(
        self,
        stream: EngineStream,
        pieces: AsyncIterator[Piece],
        *,
        state: AsyncIterator[bytes] | None = None,
        keep: Keep | None = None,
    ) -> None:
        """Go through the whole document; `keep` gets the states on the way that work can begin again from.

        Raises: ServiceError of the engine, of the pieces, of the sink or of `keep`.
        """
        run = EngineRun(stream, on_rows=self._take, waiting=self.load.waiting)
        if keep is not None:
            self._marks = marks = TextMarks(self.begin.mark)

            async def on_state(position: int, data: AsyncIterator[bytes]) -> None:
                token, byte = self._offsets.edge
                if token == position and not run.ends_at(position):  # not within a row
                    await keep(RunPoint(position, byte, self.rows, marks.before(position)), data)

            run.on_state = on_state
        await run.work(self._tokens(pieces), state)
        self.load.done(self.tokens)

    async def _tokens(self, pieces: AsyncIterator[Piece]) -> AsyncGenerator[TokenArray]:
        """Those that are not in the state to begin with."""
        async for piece in pieces:
            known = max(0, self.begin.tokens - self._offsets.tokens)
            self._offsets.push(piece.byte_lengths)
            if self._marks is not None:
                self._marks.push(piece.mark)
            self.load.tokenised(len(piece.tokens), int(piece.byte_lengths.sum()))
            yield piece.tokens[known:]

    async def _take(self, event: Rows) -> None:
        """Rows to the sink, by their places in the document."""
        total, dim = len(event.starts), self._dim
        if len(event.stops) != total or len(event.vectors) != 4 * dim * total:
            raise EngineFailure(
                f"the engine sent {len(event.vectors)} bytes for {total} rows of {dim} float32; "
                "is it serving another model?"
            )
        if total:
            self.load.done(event.stops[-1])
        rows = msgspec.structs.replace(event, first_row=self.begin.row + event.first_row)
        step = max(1, FLOATS_PER_CALL // dim)
        for first in range(0, total, step):
            count = min(step, total - first)
            some = slice(first, first + count)
            spans = self._offsets.ranges(event.starts[some], event.stops[some])
            block = row_block(rows, first, count, spans, dim).after(self._first_row)
            if len(block):
                await self._sink(block)
        self.rows += total
