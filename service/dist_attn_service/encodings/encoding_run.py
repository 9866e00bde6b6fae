"""One document in the engine: pieces of tokens go in as fast as it gives credit, blocks of rows come out in order."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from dist_attn.errors import WireError
from dist_attn.text.base import TokenArray
from dist_attn.text.byte_offsets import ByteOffsets
from dist_attn.text.cuts import CutFinder
from dist_attn.wire.messages import Checkpoint, Rows, RowSpec
from dist_attn_service.base.errors import EngineFailure
from dist_attn_service.engine.run import EngineRun
from dist_attn_service.engine.stream import EngineStream
from dist_attn_service.engine.workload import DocumentLoad
from dist_attn_service.text.tokenising import Piece, TextMark, TextMarks, ThreadTokeniser

LOOKED_AT_BYTES = 1 << 13  # for ends of rows, at most some milliseconds: other requests get their turn
FLOATS_PER_CALL = 1 << 15  # about 4 ms of formatting: other threads get their turn


@dataclass(frozen=True)
class RowBlock:
    """Some rows in order, the first of them row `first_row` of the document.

    Shapes: ranges_N4 int64, for each row start and stop in tokens, then in bytes; vectors_ND little-endian float32.
    """

    first_row: int
    ranges_N4: npt.NDArray[np.int64]
    vectors_ND: npt.NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.vectors_ND)

    def after(self, row: int) -> "RowBlock":
        """The rows from row `row` of the document on."""
        drop = min(max(row - self.first_row, 0), len(self))
        return RowBlock(self.first_row + drop, self.ranges_N4[drop:], self.vectors_ND[drop:])

    def first(self, count: int) -> "RowBlock":
        """The first rows, at most `count`."""
        return RowBlock(self.first_row, self.ranges_N4[:count], self.vectors_ND[:count])


def row_block(rows: Rows, first: int, count: int, spans: list[tuple[int, int]], dim: int) -> RowBlock:
    """Rows [first, first + count) of one message; `spans` are the byte ranges of exactly these.

    Raises: EngineFailure when a vector holds a value that is not a number.
    """
    vectors = np.frombuffer(rows.vectors, dtype="<f4", count=count * dim, offset=4 * first * dim).reshape(count, dim)
    if not np.isfinite(vectors).all():
        raise EngineFailure(f"the engine computed a value that is not finite near row {rows.first_row + first}")
    some = slice(first, first + count)
    starts, stops = (np.array(values[some], dtype=np.int64) for values in (rows.starts, rows.stops))
    ranges = np.column_stack((starts, stops, np.array(spans, dtype=np.int64).reshape(count, 2)))
    return RowBlock(rows.first_row + first, ranges, vectors)


async def pieces_of(
    tokeniser: ThreadTokeniser, spec: RowSpec, blocks: AsyncIterator[bytes], begin: TextMark, given: Sequence[int] = ()
) -> AsyncGenerator[Piece]:
    """The tokens of a stream of bytes, with marks at the ends of rows where these are to be found or are `given`.

    `given` has byte offsets. Only a whole text can be marked: `begin` is then its beginning.
    """
    finder = CutFinder(spec.granularity, given) if spec.marked else None

    async def seen() -> AsyncIterator[bytes]:
        async for block in blocks:
            if finder is not None:
                for start in range(0, len(block), LOOKED_AT_BYTES):
                    finder.push(block[start : start + LOOKED_AT_BYTES])
                    await asyncio.sleep(0)
            yield block

    async with aclosing(tokeniser.pieces(seen(), begin)) as pieces:
        async for piece in pieces:
            yield piece if finder is None else Piece(*finder.mark(piece.tokens, piece.byte_lengths), piece.mark)
    if finder is not None:
        finder.push(b"", final=True)
        none = np.empty(0, dtype=np.int32)
        yield Piece(*finder.mark(none, none, final=True))


def count_rows(spec: RowSpec, tokens: int) -> int:
    """The number of rows of a document of so many tokens, where rows do not end at marks."""
    match spec.granularity:
        case "token":
            return tokens
        case "document":
            return min(tokens, 1)
        case _:
            return -(-tokens // spec.window)


class RunPoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A point at which the work on a document may begin again: row `row`, which begins at these tokens and bytes.

    The text is tokenised from `mark` on, which lies there or before it.
    """

    tokens: int = 0
    byte: int = 0
    row: int = 0
    mark: TextMark = TextMark()


Sink = Callable[[RowBlock], Awaitable[None]]
Keep = Callable[[RunPoint | None, Checkpoint], Awaitable[None]]


@dataclass
class EncodingRun:
    """The work on one document. Rows before `first_row` are computed, as later ones need the state after them, and
    not given to the sink. With `begin` the engine has the state there, and the text comes from its mark on.
    """

    spec: RowSpec
    dim: int
    sink: Sink
    load: DocumentLoad
    first_row: int = 0
    begin: RunPoint = field(default_factory=RunPoint)

    def __post_init__(self) -> None:
        begin, mark = self.begin, self.begin.mark
        self._offsets = ByteOffsets(self.spec, mark.tokens, mark.byte - mark.gap, (begin.tokens, begin.byte))
        self._marks: TextMarks | None = None  # of runs that may begin again: they grow with the text
        self._every = 0
        self._edges: dict[int, tuple[int, int]] = {}  # by token: the byte and the row that begin where a state may be
        self.rows = begin.row

    @property
    def tokens(self) -> int:
        """Tokens of the document up to the last one that was handed to the engine."""
        return self._offsets.tokens

    @property
    def text_bytes(self) -> int:
        """The bytes of the document that these tokens stand for."""
        return self._offsets.bytes

    async def work(
        self,
        stream: EngineStream,
        pieces: AsyncIterator[Piece],
        *,
        keep: Keep | None = None,
        every: int = 0,
    ) -> None:
        """Go through the whole document; `keep` gets the states at multiples of `every` tokens and at the end.

        With each comes the point at which work can begin again from it, None where that is within a row or the end.

        Raises: ServiceError of the engine, of the pieces, of the sink or of `keep`.
        """
        run = EngineRun(stream, on_rows=self._take, waiting=self.load.waiting)
        if keep is not None:
            self._every, self._marks = every, TextMarks(self.begin.mark)
            marks = self._marks

            async def on_state(state: Checkpoint) -> None:
                position, point = state.position, None
                edge = self._edges.pop(position, None)
                if edge is not None and not run.ends_at(position):
                    point = RunPoint(position, *edge, marks.before(position))
                await keep(point, state)

            run.on_state = on_state
        await run.work(self._tokens(pieces))
        self.load.done(self.tokens)

    async def _tokens(self, pieces: AsyncIterator[Piece]) -> AsyncGenerator[TokenArray]:
        """Yield the tokens that are not in the state to begin with."""
        async for piece in pieces:
            known = max(0, self.begin.tokens - self._offsets.tokens)
            self._offsets.push(piece.byte_lengths, piece.tokens if self.spec.marked else None)
            if self._marks is not None:
                self._marks.push(piece.mark)
            self.load.tokenised(len(piece.tokens), int(piece.byte_lengths.sum()))
            yield piece.tokens[known:]

    async def _take(self, event: Rows) -> None:
        """Give rows to the sink, by their places in the document."""
        total, dim = len(event.starts), self.dim
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
            try:
                spans = self._offsets.ranges(event.starts[some], event.stops[some])
            except WireError as error:
                raise EngineFailure(str(error)) from None
            if self._every:
                for at in np.flatnonzero(np.array(event.stops[some]) % self._every == 0).tolist():
                    self._edges[event.stops[first + at]] = spans[at][1], rows.first_row + first + at + 1
            block = row_block(rows, first, count, spans, dim).after(self.first_row)
            if len(block):
                await self.sink(block)
        self.rows += total
