"""The bytes of an upload into a session as they come: disk -> tokens -> engine, states into the store.

It is read from the disk, where what has come is kept, so that neither a broken connection nor the death of this process
costs more than what lies behind the last state. Memory: a block of the text and its tokens, a piece of a state.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import final

import numpy as np

from dist_attn.store.ledger import changed
from dist_attn.wire.session_messages import BeginState, Checkpoint, Restored, SessionDone
from dist_attn_service.base.errors import ClientGone, Code, EngineFailure, ServiceError
from dist_attn_service.engine.context import ServiceContext
from dist_attn_service.engine.session_stream import SessionStream, SessionWork
from dist_attn_service.feeding.feed import Feed
from dist_attn_service.http.exchange import task_group
from dist_attn_service.sessions.writer import SessionWriter, writing
from dist_attn_service.text.text_check import Utf8Check
from dist_attn_service.text.tokenising import TextMark, TextMarks
from dist_attn_service.uploads.entries import FeedMark, FeedRecord
from dist_attn_service.uploads.service import FileService

__all__ = ["Feeder"]

NO_TOKENS = np.empty(0, dtype=np.int32)
BUSY_SECONDS = 5.0  # for another process to let go of the session
BUSY_LOOK_SECONDS = 0.1
LOOK_SECONDS = 0.5
CHARACTER_BYTES = 4


@dataclass
class _Run:
    """One feeding: `known` is the position up to which the session has the text already."""

    feed: Feed
    writer: SessionWriter
    known: int
    marks: TextMarks

    @property
    def start(self) -> int:
        """The position at which the text begins."""
        return self.writer.append.start


@final
class Feeder:
    """Feeds; holds what all share, nothing of any one upload."""

    def __init__(self, context: ServiceContext, shelf: FileService) -> None:
        self._context = context
        self._shelf = shelf

    async def run(self, feed: Feed) -> None:
        """Feed the session until it stands at the end of the text.

        Raises: ServiceError when it stands elsewhere, is being written to or cannot be fed; ClientGone when nobody
            sends any more and every whole state of what came is kept.
        """
        async with contextlib.AsyncExitStack() as held:
            writer = await self._become_writer(feed, held)
            feed.position = feed.kept = writer.append.position
            if not writer.done:
                await self._note(feed, changed(feed.told, start=writer.append.start, state="feeding", error=""))
            if not feed.begun.done():
                feed.begun.set_result(None)
            if not writer.done:
                await self._feed(feed, writer)
        await self._note(feed, changed(feed.told, state="done", position=feed.position, marks=()))

    async def _become_writer(self, feed: Feed, held: contextlib.AsyncExitStack) -> SessionWriter:
        """The session's writer, for as long as `held`.

        Raises: ServiceError; when somebody else writes to it, only after a while.
        """
        until = time.monotonic() + BUSY_SECONDS
        while True:
            key, expected = f"upload {feed.name}", feed.told.expected
            try:
                return await held.enter_async_context(
                    writing(self._context.store, feed.caller, feed.told.session, key, expected)
                )
            except ServiceError as error:
                if error.code is not Code.SESSION_BUSY or time.monotonic() > until:
                    raise
            await asyncio.sleep(BUSY_LOOK_SECONDS)

    async def _feed(self, feed: Feed, writer: SessionWriter) -> None:
        await self._context.watch.until_ready()
        self._context.watch.manifest()
        known = writer.append.position
        marks = [mark for mark in feed.told.marks if mark.position <= known]
        begin = marks[-1].mark if marks else TextMark()
        run = _Run(feed, writer, known, TextMarks(begin))
        point = writer.begin
        state = None if point is None else BeginState(point.position, (await writer.state(point)).size)
        work = SessionWork(state, checkpoint_tokens=self._context.settings.checkpoint_tokens)
        try:
            with self._context.engine.open_session(work, feed.name) as stream:
                await stream.admitted(self._context.settings.admission_seconds)
                async with task_group() as group:
                    group.create_task(self._send(run, stream, begin))
                    await self._collect(run, stream)
        except ServiceError as error:
            error.facts.setdefault("position", writer.kept)
            raise
        finally:
            self._context.metrics.tokens("prompt", max(0, feed.position - known))

    # ---- in ------------------------------------------------------------------------------------

    async def _send(self, run: _Run, stream: SessionStream, begin: TextMark) -> None:
        """Tokens to the engine as fast as it gives credit; those that are in the state already are passed over.

        Raises: ClientGone when nobody sends any more, once every whole state of what came is kept.
        """
        feed, writer = run.feed, run.writer
        if writer.begin is not None:
            await stream.restore(writer.pieces(writer.begin))
        try:
            async with (
                contextlib.aclosing(self._blocks(feed, begin.byte)) as blocks,
                contextlib.aclosing(self._context.tokeniser.pieces(blocks, begin)) as pieces,
            ):
                async for piece in pieces:
                    stop = run.start + piece.mark.tokens
                    run.marks.push(piece.mark)
                    feed.position = max(feed.position, stop)
                    first = stop - len(piece.tokens)
                    await stream.send(piece.tokens[max(0, run.known - first) :], final=False)
        except ClientGone:
            await self._until_kept(run)
            raise
        feed.whole = True
        await stream.send(NO_TOKENS, final=True)

    async def _blocks(self, feed: Feed, start: int) -> AsyncGenerator[bytes]:
        """The text from byte `start` on, as it comes to the disk.

        Raises: ClientGone when nobody sends any more; BadRequest for a text that is not UTF-8.
        """
        check = await self._check(feed, start) if feed.told.is_text else None
        at = start
        feed.took(at)
        while at < feed.length:
            if at >= feed.size:
                if feed.abandoned:
                    feed.leaving = True
                    raise ClientGone
                await feed.changed(LOOK_SECONDS)
                continue
            stop = min(feed.size, at + self._context.settings.piece_bytes)
            async with contextlib.aclosing(self._shelf.read_bytes(feed.segments, at, stop)) as pieces:
                async for piece in pieces:
                    if check is not None:
                        check.push(piece)
                    yield piece
            at = stop
            feed.took(at)
        if check is not None:
            check.push(b"", final=True)

    async def _check(self, feed: Feed, start: int) -> Utf8Check:
        """A check of what comes from byte `start` on; the character that it lies in began before."""
        before = max(0, start - CHARACTER_BYTES)
        async with contextlib.aclosing(self._shelf.read_bytes(feed.segments, before, start)) as pieces:
            tail = b"".join([piece async for piece in pieces])
        at = next((place for place in reversed(range(len(tail))) if tail[place] & 0xC0 != 0x80), len(tail))
        check = Utf8Check(before + at)
        check.push(tail[at:])
        return check

    async def _until_kept(self, run: _Run) -> None:
        """Wait for the last state that comes back without the end of the text."""
        grid = self._context.watch.manifest().computed.chunk_tokens
        every = -(-self._context.settings.checkpoint_tokens // grid) * grid
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._context.settings.detached_seconds):
                while run.feed.position // every * every > run.writer.kept:
                    await run.feed.changed(LOOK_SECONDS)

    # ---- out -----------------------------------------------------------------------------------

    async def _collect(self, run: _Run, stream: SessionStream) -> None:
        """States into the store as they come, until the engine says that this was all."""
        feed, writer, last = run.feed, run.writer, ""
        while True:
            match await stream.next():
                case Restored():
                    pass
                case Checkpoint(position=position) as checkpoint if position <= feed.position:
                    last = await writer.keep(stream.snapshot(checkpoint))
                    if not feed.whole or position < feed.position:
                        await self._advance(run, position, last)
                case SessionDone(position=position) if last and feed.whole and position == feed.position:
                    await writer.advance(position, last, done=True)
                    feed.kept = position
                    return
                case event:
                    raise EngineFailure(
                        f"the engine answered an upload's tokens up to {feed.position} with {event!r:.200}"
                    )

    async def _advance(self, run: _Run, position: int, snapshot: str) -> None:
        """The session stands there. What the state has read is safe on the disk before, and where it ends is noted."""
        feed = run.feed
        mark = FeedMark(position, run.marks.before(position - run.start))
        before = [other for other in feed.told.marks if other.position <= feed.kept]
        await self._note(feed, changed(feed.told, position=feed.kept, marks=(*before[-1:], mark)))
        await run.writer.advance(position, snapshot)
        feed.kept = position
        feed.notify()

    async def _note(self, feed: Feed, told: FeedRecord) -> None:
        feed.told = await self._shelf.note_feed(feed.caller, feed.name, told, feed.segments, feed.size)
