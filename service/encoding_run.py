"""One document in the engine: pieces of tokens go in as fast as it gives credit, blocks of rows come out in order."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack

import numpy as np

from dist_attn.wire.messages import EncodingDone, Rows, RowSpec
from service.engine_stream import EngineStream
from service.errors import EngineFailure
from service.exchange import task_group
from service.rows import FLOATS_PER_CALL, ByteOffsets, RowBlock, row_block
from service.tokenising import Piece
from service.workload import DocumentLoad

__all__ = ["EncodingRun", "count_rows"]

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


class EncodingRun:
    """The work on one document. Rows before `first_row` are computed, as later ones need the state behind them, and
    not given to the sink.
    """

    def __init__(self, spec: RowSpec, dim: int, sink: Sink, *, first_row: int = 0, load: DocumentLoad) -> None:
        self._spec = spec
        self._dim = dim
        self._sink = sink
        self._first_row = first_row
        self._load = load
        self._offsets = ByteOffsets(spec)
        self.rows = 0

    @property
    def tokens(self) -> int:
        """Tokens that were handed to the engine."""
        return self._offsets.tokens

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
                done = await self._collect(stream)
        if (done.tokens, done.rows) != (self.tokens, self.rows):
            raise EngineFailure(
                f"the engine counted {done.tokens} tokens and {done.rows} rows where {self.tokens} and {self.rows} "
                "went through this service"
            )

    async def _feed(self, stream: EngineStream, pieces: AsyncIterator[Piece], until_done: ExitStack) -> None:
        async for piece in pieces:
            self._offsets.push(piece.byte_lengths)
            self._load.tokenised(len(piece.tokens), int(piece.byte_lengths.sum()))
            with self._load.waiting():
                await stream.send(piece.tokens, final=False)
        until_done.enter_context(self._load.waiting())
        await stream.send(_NO_TOKENS, final=True)

    async def _collect(self, stream: EngineStream) -> EncodingDone:
        """Rows to the sink until the engine says that these were all."""
        while isinstance(event := await stream.next(), Rows):
            total, dim = len(event.starts), self._dim
            if len(event.stops) != total or len(event.vectors) != 4 * dim * total:
                raise EngineFailure(
                    f"the engine sent {len(event.vectors)} bytes for {total} rows of {dim} float32; "
                    "is it serving another model?"
                )
            if total:
                self._load.done(event.stops[-1])
            step = max(1, FLOATS_PER_CALL // dim)
            for first in range(0, total, step):
                count = min(step, total - first)
                some = slice(first, first + count)
                spans = self._offsets.ranges(event.starts[some], event.stops[some])
                block = row_block(event, first, count, spans, dim).after(self._first_row)
                if len(block):
                    await self._sink(block)
            self.rows += total
        if not isinstance(event, EncodingDone):
            raise EngineFailure("the engine answered an encoding with generated tokens")
        self._load.done(event.tokens)
        return event
