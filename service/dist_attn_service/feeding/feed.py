"""One upload that feeds a session: how much of it is on disk, how much was read of it, and who waits for whom."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import final

from dist_attn_service.base.errors import ServiceError
from dist_attn_service.uploads.entries import FeedRecord, Segment, UploadRecord

__all__ = ["Feed"]

LINGER_SECONDS = 2.0  # for a client that sends its next request


@final
class Feed:
    """The moving parts of one upload in this process: who sends tells what has come, who feeds tells what was read.

    `position` is that of the session after the last token that was handed to the engine, `kept` that of its last
    state. It ends with the whole text, or some time after nobody sends any more.
    """

    def __init__(
        self, caller: str, name: str, record: UploadRecord, segments: tuple[Segment, ...], size: int, ahead: int
    ) -> None:
        assert record.feed is not None
        self.caller = caller
        self.name = name
        self.segments = segments
        self.length = record.length
        self.told: FeedRecord = record.feed
        self.size = size
        self.taken = 0
        self.position = self.kept = record.feed.expected
        self.leaving = False  # nobody sends any more: who does from now on needs another one
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
        """Whether nobody sends any more."""
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
