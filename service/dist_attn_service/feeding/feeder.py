"""The bytes of an upload into a session as they come: disk -> tokens -> engine, states into the store.

It is read from the disk, where what has come is kept, so that neither a broken connection nor the death of this process
costs more than what lies behind the last state. Memory: a block of the text and its tokens, a piece of a state.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager, suppress
from typing import final

from dist_attn.store import Reached
from dist_attn.store.ledger import changed
from dist_attn.wire.messages import Keep, OpenWork
from dist_attn_service.base.errors import ClientGone, Code, ServiceError
from dist_attn_service.engine.run import ServiceContext
from dist_attn_service.sessions.writer import SessionWriter, TextRun, writing
from dist_attn_service.text.text_check import Utf8Check
from dist_attn_service.text.tokenising import Piece, TextMark, TextMarks
from dist_attn_service.uploads.ledger import FeedMark, FeedRecord, Segment, UploadRecord
from dist_attn_service.uploads.service import FileService

BUSY_SECONDS = 5.0  # for another process to let go of the session
BUSY_POLL_SECONDS = 0.1
POLL_SECONDS = 0.5
LINGER_SECONDS = 2.0  # for a client that sends its next request
CHARACTER_BYTES = 4


@final
class Feed:
    """The moving parts of one upload in this process: who sends tells what has come, who feeds tells what was read.

    `position` is that of the session after the last token that was handed to the engine, `kept` that of its last
    state. It ends with the whole text, or some time after its senders have gone.
    """

    def __init__(
        self, caller: str, name: str, record: UploadRecord, segments: tuple[Segment, ...], size: int, ahead: int
    ) -> None:
        assert record.feed is not None
        self.caller = caller
        self.name = name
        self.segments = segments
        self.length = record.length
        self.recorded: FeedRecord = record.feed
        self.size = size
        self.taken = 0
        self.position = self.kept = record.feed.expected
        self.leaving = False  # its senders have gone: a request from now on needs another one
        self.error: ServiceError | None = None
        self.begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.begun.add_done_callback(lambda future: future.cancelled() or future.exception())
        self.task: asyncio.Task[None] | None = None
        self._ahead = ahead
        self._senders = 0
        self._quiet_since = time.monotonic()
        self._changed = asyncio.Event()

    # ---- who sends -----------------------------------------------------------------------------

    @contextmanager
    def sending(self) -> Iterator[None]:
        """More of the upload may come in the block."""
        self._senders += 1
        try:
            yield
        finally:
            self._senders -= 1
            self._quiet_since = time.monotonic()
            self.notify()

    def reached(self, size: int) -> None:
        """So many bytes are on disk."""
        self.size = max(self.size, size)
        self.notify()

    def keeps_up(self, size: int) -> bool:
        """Whether what is read is not too far behind so many bytes.

        Raises: ServiceError when the feeding has failed.
        """
        if self.error is not None:
            raise self.error
        return self.task is None or self.task.done() or size - self.taken <= self._ahead

    async def finished(self) -> None:
        """Return when the session stands at the end of the text.

        Raises: ServiceError when that cannot be.
        """
        if self.task is not None:
            await asyncio.wait({self.task})
        if self.error is not None:
            raise self.error

    # ---- who feeds -----------------------------------------------------------------------------

    @property
    def abandoned(self) -> bool:
        """Whether its senders have gone."""
        return not self._senders and time.monotonic() - self._quiet_since > LINGER_SECONDS

    def took(self, size: int) -> None:
        """So many bytes were read."""
        self.taken = size
        self.notify()

    # ---- both ----------------------------------------------------------------------------------

    def notify(self) -> None:
        """Something has changed."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def changed(self, seconds: float) -> None:
        """Wait until something changes, at most so long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()


@final
class Feeder:
    """Feeds; holds what all share, nothing of any one upload."""

    def __init__(self, context: ServiceContext, files: FileService) -> None:
        self._context = context
        self._files = files

    async def run(self, feed: Feed) -> None:
        """Feed the session until it stands at the end of the text.

        Raises: ServiceError when it stands elsewhere, is being written to or cannot be fed; ClientGone when nobody
            sends any more and every whole state of what came is kept.
        """
        async with contextlib.AsyncExitStack() as held:
            writer = await self._become_writer(feed, held)
            feed.position = feed.kept = writer.append.position
            if not writer.done:
                await self._note(feed, changed(feed.recorded, start=writer.append.start, state="feeding", error=""))
            if not feed.begun.done():
                feed.begun.set_result(None)
            if not writer.done:
                await self._feed(feed, writer)
        await self._note(feed, changed(feed.recorded, state="done", position=feed.position, marks=()))

    async def _become_writer(self, feed: Feed, held: contextlib.AsyncExitStack) -> SessionWriter:
        """The session's writer, for as long as `held`.

        Raises: ServiceError; while another writer has it, only after a while.
        """
        until = time.monotonic() + BUSY_SECONDS
        while True:
            key, expected = f"upload {feed.name}", feed.recorded.expected
            try:
                return await held.enter_async_context(
                    writing(self._context.store, feed.caller, feed.recorded.session, key, expected)
                )
            except ServiceError as error:
                if error.code is not Code.SESSION_BUSY or time.monotonic() > until:
                    raise
            await asyncio.sleep(BUSY_POLL_SECONDS)

    async def _feed(self, feed: Feed, writer: SessionWriter) -> None:
        await self._context.watch.until_ready()
        self._context.watch.manifest()
        known = writer.append.position
        mark = next((mark.mark for mark in reversed(feed.recorded.marks) if mark.position <= known), TextMark())
        marks = TextMarks(mark)

        async def advance(position: int, snapshot: str) -> None:
            await self._advance(
                feed, writer, FeedMark(position, marks.before(position - writer.append.start)), snapshot
            )

        keep = Keep(self._context.settings.checkpoint_tokens, end=True)
        run = TextRun(self._context, writer, advance)
        try:
            async with self._context.open(OpenWork(feed.name, await writer.begin(), keep=keep)) as stream:
                await run.work(stream, self._pieces(feed, writer, marks, mark))
            await writer.advance(Reached(run.position, run.snapshot, done=True))
            feed.kept = run.position
        except ServiceError as error:
            error.facts.setdefault("position", writer.kept)
            raise
        finally:
            self._context.metrics.tokens("prompt", max(0, feed.position - known))

    async def _pieces(
        self, feed: Feed, writer: SessionWriter, marks: TextMarks, begin: TextMark
    ) -> AsyncGenerator[Piece]:
        """The text's tokens from a mark on.

        Raises: ClientGone when its senders have gone.
        """
        async with (
            contextlib.aclosing(self._blocks(feed, begin.byte)) as blocks,
            contextlib.aclosing(self._context.tokeniser.pieces(blocks, begin)) as pieces,
        ):
            async for piece in pieces:
                marks.push(piece.mark)
                feed.position = max(feed.position, writer.append.start + piece.mark.tokens)
                yield piece

    async def _blocks(self, feed: Feed, start: int) -> AsyncGenerator[bytes]:
        """The text from byte `start` on, as it comes to the disk.

        Raises: ClientGone when its senders have gone; BadRequest for a text that is not UTF-8.
        """
        check = await self._check(feed, start) if feed.recorded.is_text else None
        at = start
        feed.took(at)
        while at < feed.length:
            if at >= feed.size:
                if feed.abandoned:
                    feed.leaving = True
                    raise ClientGone
                await feed.changed(POLL_SECONDS)
                continue
            stop = min(feed.size, at + self._context.settings.piece_bytes)
            async with contextlib.aclosing(self._files.read(feed.segments, at, stop)) as pieces:
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
        async with contextlib.aclosing(self._files.read(feed.segments, before, start)) as pieces:
            tail = b"".join([piece async for piece in pieces])
        at = next((place for place in reversed(range(len(tail))) if tail[place] & 0xC0 != 0x80), len(tail))
        check = Utf8Check(before + at)
        check.push(tail[at:])
        return check

    async def _advance(self, feed: Feed, writer: SessionWriter, mark: FeedMark, snapshot: str) -> None:
        """The session stands there. What the state has read is safe on the disk before, and where it ends is noted."""
        before = [other for other in feed.recorded.marks if other.position <= feed.kept]
        await self._note(feed, changed(feed.recorded, position=feed.kept, marks=(*before[-1:], mark)))
        await writer.advance(Reached(mark.position, snapshot))
        feed.kept = mark.position
        feed.notify()

    async def _note(self, feed: Feed, recorded: FeedRecord) -> None:
        feed.recorded = await self._files.note_feed(feed.caller, feed.name, recorded, feed.segments, feed.size)
