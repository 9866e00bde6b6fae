"""A text into a session: its tokens to the engine, each once, and its states into the store as they come."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import final

from dist_attn.text.base import TokenArray
from dist_attn.wire.manifest import RestoreReport
from dist_attn_service.base.errors import ClientGone
from dist_attn_service.engine.context import ServiceContext
from dist_attn_service.engine.run import EngineRun
from dist_attn_service.engine.stream import EngineStream
from dist_attn_service.sessions.writer import SessionWriter
from dist_attn_service.text.tokenising import Piece

__all__ = ["TextRun"]

Advance = Callable[[int, str], Awaitable[None]]


@final
class TextRun:
    """The work on one text. `advance` lets the session stand at a position on the way, with the state kept for it."""

    def __init__(self, context: ServiceContext, writer: SessionWriter, advance: Advance) -> None:
        self._context = context
        self._writer = writer
        self._advance = advance
        self.position = writer.append.position
        """That of the session after the last token that came."""
        self.snapshot = ""
        """The state that was kept last."""
        self.moved = asyncio.Event()
        """Set whenever the session advances."""

    async def work(self, stream: EngineStream, pieces: AsyncGenerator[Piece]) -> RestoreReport:
        """Feed the text to its end, as fast as the engine gives credit: then `snapshot` is the state there.

        Raises: ServiceError; ClientGone when the text breaks off, once every whole state of what came is kept.
        """
        run = EngineRun(stream)

        async def on_state(position: int, data: AsyncIterator[bytes]) -> None:
            self.snapshot = await self._writer.keep(data)
            if not run.ends_at(position):
                await self._advance(position, self.snapshot)
                self.moved.set()

        run.on_state = on_state
        await run.work(self._tokens(pieces), self._writer.begin_bytes())
        return run.report

    async def _tokens(self, pieces: AsyncGenerator[Piece]) -> AsyncGenerator[TokenArray]:
        """Those that are not in the state to begin with."""
        start, known = self._writer.append.start, self._writer.append.position
        try:
            async with contextlib.aclosing(pieces):
                async for piece in pieces:
                    stop = start + piece.mark.tokens
                    self.position = max(self.position, stop)
                    yield piece.tokens[max(0, known - stop + len(piece.tokens)) :]
        except ClientGone:
            await self._until_kept()
            raise

    async def _until_kept(self) -> None:
        """Wait for the last state that comes back without the end of the text."""
        grid = self._context.watch.manifest().computed.chunk_tokens
        every = -(-self._context.settings.checkpoint_tokens // grid) * grid
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._context.settings.detached_seconds):
                while self.position // every * every > self._writer.kept:
                    self.moved.clear()
                    await self.moved.wait()
