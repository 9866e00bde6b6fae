"""The uploads that this process feeds to sessions: begun by a request, gone on with by the next, told of by HEAD."""

import asyncio
from contextlib import suppress
from typing import Literal, final

from dist_attn.errors import DistAttnError
from dist_attn.store import Session
from dist_attn.store.ledger import changed
from dist_attn_api.types import Feeding
from dist_attn_service.base.errors import NO_RETRY, ClientGone, Code, NotFound, ServiceError, UnforeseenError
from dist_attn_service.engine.run import ServiceContext
from dist_attn_service.feeding.feeder import Feed, Feeder
from dist_attn_service.sessions.answers import store_refusals
from dist_attn_service.uploads.ledger import FeedRecord, UploadRecord
from dist_attn_service.uploads.service import FileService

LASTING = (400, 404, 409, 413)
"""Statuses of errors that come again if the same is tried again."""


@final
class FeedingService:
    """What routes do with uploads that feed."""

    def __init__(self, context: ServiceContext, files: FileService) -> None:
        self._context = context
        self._files = files
        self._feeder = Feeder(context, files)
        self._feeds: dict[str, Feed] = {}

    async def wanted(self, caller: str, session: str, expected: int | None, *, is_text: bool) -> FeedRecord:
        """What a new upload is told to feed, as the session stands now.

        Raises: NotFound; ServiceError (409) when it does not stand where it is expected to.
        """
        try:
            with store_refusals():
                stored = await self._context.store.sessions.get(caller, session)
        except NotFound as error:
            raise NotFound(error.message, param="session_id") from None
        if expected is not None and expected != stored.position:
            raise ServiceError(
                f"session {session} stands at {stored.position}, not at {expected}; begin the upload for there",
                code=Code.CONFLICT,
                param="expected_position",
                headers=NO_RETRY,
                facts={"expected_position": expected, "position": stored.position},
            )
        return FeedRecord(session, stored.position, is_text)

    async def begin(self, caller: str, name: str) -> Feed:
        """The feeding of an upload of this caller, which goes on in this process from now on.

        Raises: NotFound; ServiceError (409) when the session stands elsewhere by now, or another writer has it.
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
        """How far it is. One whose text is whole is gone on with, should its process have died.

        Raises: NotFound; ServiceError (507).
        """
        recorded = record.feed
        assert recorded is not None
        session = await self._session(caller, recorded.session)
        idle = session is not None and not session.busy_until
        ended = recorded.state in ("done", "failed")
        if record.state == "completed" and not ended and idle and name not in self._feeds:
            with suppress(ServiceError):  # the record says why it cannot be
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
        """Let go of all sessions: who sends on begins again behind their last states."""
        tasks = [feed.task for feed in self._feeds.values() if feed.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _work(self, feed: Feed) -> None:
        """Feed, and say in the record how it ended."""
        state: Literal["waiting", "failed"] = "waiting"
        try:
            await self._feeder.run(feed)
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
        if not was_writer:  # who is may be another process: the record is its own
            return
        recorded = changed(feed.recorded, state=state, error=feed.error.message if feed.error else "")
        with suppress(ServiceError):  # it was deleted
            await self._files.note_feed(feed.caller, feed.name, recorded)
        self._context.log.info("feed", upload=feed.name, state=state, position=feed.kept, error=recorded.error)
