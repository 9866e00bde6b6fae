"""Uploads that feed sessions as their bytes come: disk -> tokens -> engine, states into the store; and their progress.

A request begins the feeding, the next one goes on with it, and HEAD tells its progress. Bytes are read from the disk,
where all that came is kept, so that a broken connection or the death of this process costs only what came after the
last state. Memory: a block of the text and its tokens, a piece of a state.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import AsyncExitStack, aclosing, contextmanager, suppress
from typing import Literal, final

import msgspec

from dist_attn.errors import DistAttnError
from dist_attn.store import Reached, Session
from dist_attn.store.ledger import changed
from dist_attn.wire.messages import Keep, OpenWork
from dist_attn_api.types import Feeding
from dist_attn_service.base.errors import ClientGone, Code, Conflict, NotFound, ServiceError, UnforeseenError
from dist_attn_service.base.parsing import RequestTerms
from dist_attn_service.base.tasks import Changes, stop_tasks
from dist_attn_service.engine.run import ServiceContext
from dist_attn_service.sessions.answers import store_refusals
from dist_attn_service.sessions.writer import SessionWriter, TextRun, writing
from dist_attn_service.text.text_check import Utf8Check
from dist_attn_service.text.tokenising import Piece, TextMark, TextMarks
from dist_attn_service.uploads.byte_files import QUIET_SECONDS, BlobWriter
from dist_attn_service.uploads.ledger import Segment, Size, UploadRecord
from dist_attn_service.uploads.service import FileService

BUSY_SECONDS = 5.0  # for another process to let go of the session
BUSY_POLL_SECONDS = 0.1
POLL_SECONDS = 0.5
LINGER_SECONDS = 2.0  # for a client that sends its next request
CHARACTER_BYTES = 4
LASTING = (400, 404, 409, 413)
"""The statuses of errors that would only come again if the same was tried again."""


class FeedMark(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A position of a session whose state was to be kept, and the place of the text from which reading goes on."""

    position: Size
    mark: TextMark


class FeedRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The session that an upload feeds: its position was `expected`, and the text begins at `start` once that is known.

    Up to `position` it is kept. There are `marks` of the last two states, as the last one may not have been kept.
    """

    session: str
    expected: Size
    is_text: bool
    start: int | None = None
    position: Size = 0
    marks: tuple[FeedMark, ...] = ()
    state: Literal["waiting", "feeding", "done", "failed"] = "waiting"
    error: str = ""

    @staticmethod
    def of(upload: UploadRecord) -> "FeedRecord":
        """The record in an upload that feeds a session."""
        return msgspec.convert(upload.feed, FeedRecord)


@final
class Feed:
    """One upload in this process: its sending requests report what has come, its feeding task what was read.

    `position` is that of the session after the last token that was handed to the engine, `kept` that of its last
    state. The feed ends with the whole text, or some time after its senders have gone.
    """

    def __init__(
        self, caller: str, name: str, record: UploadRecord, segments: tuple[Segment, ...], size: int, ahead: int
    ) -> None:
        self.caller = caller
        self.name = name
        self.segments = segments
        self.length = record.length
        self.recorded = FeedRecord.of(record)
        self.size = size
        self.taken = 0
        self.position = self.kept = self.recorded.expected
        self.leaving = False  # its senders have gone: a request from now on needs another feed
        self.error: ServiceError | None = None
        self.begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.begun.add_done_callback(lambda future: future.cancelled() or future.exception())
        self.task: asyncio.Task[None] | None = None
        self._ahead = ahead
        self._senders = 0
        self._quiet_since = time.monotonic()
        self._changes = Changes()

    # ---- who sends -----------------------------------------------------------------------------

    @contextmanager
    def sending(self) -> Iterator[None]:
        """Count a sender for the block: more of the upload may come."""
        self._senders += 1
        try:
            yield
        finally:
            self._senders -= 1
            self._quiet_since = time.monotonic()
            self.notify()

    def reached(self, size: int) -> None:
        """Note that so many bytes are on disk."""
        self.size = max(self.size, size)
        self.notify()

    async def keep_up(self, writer: BlobWriter) -> None:
        """Wait until reading is not too far behind the writer.

        Raises: ServiceError when the feeding has failed; what `make_way` raises.
        """
        while self.error is None and self.task and not self.task.done() and writer.end - self.taken > self._ahead:
            await writer.flush()
            await self.changed(QUIET_SECONDS)
            await writer.make_way()
        if self.error is not None:
            raise self.error

    async def finished(self) -> None:
        """Wait until the session has read the text to its end.

        Raises: ServiceError when that cannot be.
        """
        if self.task is not None:
            await asyncio.wait({self.task})
        if self.error is not None:
            raise self.error

    # ---- who feeds -----------------------------------------------------------------------------

    @property
    def abandoned(self) -> bool:
        """Return whether all senders have gone, for LINGER_SECONDS."""
        return not self._senders and time.monotonic() - self._quiet_since > LINGER_SECONDS

    def took(self, size: int) -> None:
        """Note that so many bytes were read."""
        self.taken = size
        self.notify()

    # ---- both ----------------------------------------------------------------------------------

    def notify(self) -> None:
        """Wake all that wait for a change."""
        self._changes.notify()

    async def changed(self, seconds: float) -> None:
        """Wait for a change, at most so many seconds."""
        await self._changes.wait(time.monotonic() + seconds)


@final
class FeedingService:
    """The service of uploads that feed sessions, and the feeding itself."""

    def __init__(self, context: ServiceContext, files: FileService) -> None:
        self._context = context
        self._files = files
        self._feeds: dict[str, Feed] = {}

    async def wanted(self, caller: str, session: str, expected: int | None, *, is_text: bool) -> FeedRecord:
        """The record of what a new upload feeds: the session, from its current position on.

        Raises: NotFound; ServiceError (409) when the session has another position than expected.
        """
        try:
            with store_refusals():
                stored = await self._context.store.sessions.get(caller, session)
        except NotFound as error:
            raise NotFound(error.message, param="session_id") from None
        if expected is not None and expected != stored.position:
            raise Conflict(
                f"session {session} stands at {stored.position}, not at {expected}; begin the upload for there",
                param="expected_position",
                facts={"expected_position": expected, "position": stored.position},
            )
        return FeedRecord(session, stored.position, is_text)

    async def begin(self, caller: str, name: str) -> Feed:
        """Begin, or join, the feeding of an upload of this caller, which goes on in this process from now on.

        Raises: NotFound; ServiceError (409) when the session has another position by now, or another writer.
        """
        while (feed := self._feeds.get(name)) is not None and feed.leaving and feed.task is not None:
            await asyncio.wait({feed.task})
        if feed is None:
            record, segments, size = await self._files.fed_from(caller, name)
            feed = self._feeds.get(name)
            if feed is None:
                feed = Feed(caller, name, record, segments, size, self._context.settings.files.feed_ahead_bytes)
                self._feeds[name] = feed
                feed.task = asyncio.create_task(self._work(feed), name=f"feed {name}")
        await asyncio.shield(feed.begun)
        return feed

    async def standing(self, caller: str, name: str, record: UploadRecord) -> Feeding:
        """The progress of a feeding. If its text is whole and its process has died, this one goes on with it.

        Raises: NotFound; ServiceError (507).
        """
        recorded = FeedRecord.of(record)
        session = await self._session(caller, recorded.session)
        idle = session is not None and not session.busy_until
        ended = recorded.state in ("done", "failed")
        if record.state == "completed" and not ended and idle and name not in self._feeds:
            with suppress(ServiceError):  # the record says why it failed
                await self.begin(caller, name)
        feed = self._feeds.get(name)
        if feed is not None and feed.error is None:
            recorded = feed.recorded if feed.begun.done() else recorded
            start = recorded.expected if recorded.start is None else recorded.start
            position, kept, error = max(start, feed.position), max(start, feed.kept), None
        else:
            start = recorded.expected if recorded.start is None else recorded.start
            stands = start if session is None else session.position
            marks = [mark.position for mark in recorded.marks if mark.position <= stands]
            position = kept = recorded.position if recorded.state == "done" else max(marks, default=start)
            error = recorded.error or None
        return Feeding(
            id=recorded.session, state=recorded.state, start=start, position=position, checkpoint=kept, error=error
        )

    async def _session(self, caller: str, name: str) -> Session | None:
        with suppress(DistAttnError):
            return await self._context.store.sessions.get(caller, name)
        return None

    async def stop(self) -> None:
        """Stop all feeding: a client that goes on sending begins again after the last state."""
        await stop_tasks(*(feed.task for feed in self._feeds.values() if feed.task is not None))

    async def _work(self, feed: Feed) -> None:
        """Feed, and note in the record how it ended."""
        state: Literal["waiting", "failed"] = "waiting"
        try:
            await self._run(feed)
            return
        except ClientGone:
            pass
        except asyncio.CancelledError:
            feed.error = ServiceError("the service is stopping", code=Code.STOPPING)
            raise
        except ServiceError as error:
            feed.error = error
            state = "failed" if error.status in LASTING else "waiting"
        except Exception as error:
            self._context.log.error("unexpected error while an upload was fed", upload=feed.name, exc_info=error)
            feed.error = UnforeseenError()
        finally:
            if self._feeds.get(feed.name) is feed:
                del self._feeds[feed.name]
            was_writer = feed.begun.done()
            if not was_writer:
                feed.begun.set_exception(feed.error or UnforeseenError())
            feed.notify()
        if not was_writer:  # another process may be the writer: the record is its own
            return
        recorded = changed(feed.recorded, state=state, error=feed.error.message if feed.error else "")
        with suppress(ServiceError):  # the upload was deleted
            await self._files.note_feed(feed.caller, feed.name, msgspec.to_builtins(recorded))
        self._context.log.info("feed", upload=feed.name, state=state, position=feed.kept, error=recorded.error)

    # ---- feeding -------------------------------------------------------------------------------

    async def _run(self, feed: Feed) -> None:
        """Feed the session to the end of the text.

        Raises: ServiceError when the session has another position, has another writer or cannot be fed; ClientGone
            when nobody sends any more and every whole state of what came is kept.
        """
        async with AsyncExitStack() as held:
            writer = await self._become_writer(feed, held)
            feed.position = feed.kept = writer.append.position
            if not writer.done:
                await self._note(feed, changed(feed.recorded, start=writer.append.start, state="feeding", error=""))
            if not feed.begun.done():
                feed.begun.set_result(None)
            if not writer.done:
                await self._feed(feed, writer)
        await self._note(feed, changed(feed.recorded, state="done", position=feed.position, marks=()))

    async def _become_writer(self, feed: Feed, held: AsyncExitStack) -> SessionWriter:
        """Become the session's writer, for as long as `held`.

        Raises: ServiceError; while another writer has the session, only after BUSY_SECONDS.
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
        terms = RequestTerms(holder=feed.caller).for_engine()
        try:
            work = OpenWork(feed.name, await writer.begin(), keep=keep, terms=terms)
            async with self._context.open(work, await writer.maker(self._context)) as stream:
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
            aclosing(self._blocks(feed, begin.byte)) as blocks,
            aclosing(self._context.tokeniser.pieces(blocks, begin)) as pieces,
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
            async with aclosing(self._files.read(feed.segments, at, stop)) as pieces:
                async for piece in pieces:
                    if check is not None:
                        check.push(piece)
                    yield piece
            at = stop
            feed.took(at)
        if check is not None:
            check.push(b"", final=True)

    async def _check(self, feed: Feed, start: int) -> Utf8Check:
        """A check of the text from byte `start` on, which may lie within a character that began before."""
        before = max(0, start - CHARACTER_BYTES)
        async with aclosing(self._files.read(feed.segments, before, start)) as pieces:
            tail = b"".join([piece async for piece in pieces])
        at = next((place for place in reversed(range(len(tail))) if tail[place] & 0xC0 != 0x80), len(tail))
        check = Utf8Check(before + at)
        check.push(tail[at:])
        return check

    async def _advance(self, feed: Feed, writer: SessionWriter, mark: FeedMark, snapshot: str) -> None:
        """Move the session to a mark. First its text is made safe on the disk, and the mark noted."""
        before = [other for other in feed.recorded.marks if other.position <= feed.kept]
        await self._note(feed, changed(feed.recorded, position=feed.kept, marks=(*before[-1:], mark)))
        await writer.advance(Reached(mark.position, snapshot))
        feed.kept = mark.position
        feed.notify()

    async def _note(self, feed: Feed, recorded: FeedRecord) -> None:
        notes = msgspec.to_builtins(recorded)
        await self._files.note_feed(feed.caller, feed.name, notes, feed.segments, feed.size)
        feed.recorded = recorded
