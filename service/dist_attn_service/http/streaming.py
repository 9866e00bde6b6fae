"""Answers that are written while the request may still arrive: the response class, and server-sent events."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol, TypeVar

from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dist_attn_service.base.errors import ClientGone, Code, ServiceError, ServiceStopping, UnforeseenError
from dist_attn_service.base.logs import RequestRecord
from dist_attn_service.http.exchange import BREAK_OFF, LAST_WORDS, RequestBody, ResponseWriter

__all__ = ["EventWriter", "StreamedResponse"]

EVENT_STREAM = "text/event-stream; charset=utf-8"
PING = b": ping\n"  # one newline: a blank line would end an event, which the official client then tries to parse
DONE = b"data: [DONE]\n\n"
FAREWELL_SECONDS = 1.0
T = TypeVar("T")


class StreamedResponse(Response):
    """Runs an exchange as the response. It never calls `receive`: the exchange's RequestBody owns it.

    Starlette's StreamingResponse listens for the disconnect on the side and so eats chunks of a body
    that still arrives; an answer that streams while it reads must not do that.
    """

    def __init__(
        self,
        exchange: Callable[[ResponseWriter], Awaitable[None]],
        body: RequestBody,
        record: RequestRecord,
        *,
        last_words: Callable[[ServiceError], bytes | None],
        stall_seconds: float,
    ) -> None:
        super().__init__()
        self._exchange = exchange
        self._body = body
        self._record = record
        self._last_words = last_words
        self._stall_seconds = stall_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the exchange; whatever happens after the head, the answer ends with words that say so, or breaks off
        where `last_words` has none.

        Raises: ServiceError and anything unexpected as long as the head has not been sent.
        """
        state = scope.setdefault("state", {})
        state[LAST_WORDS] = self._last_words
        break_off = state.get(BREAK_OFF, lambda: None)
        writer = ResponseWriter(send, self._body, stall_seconds=self._stall_seconds, break_off=break_off)
        try:
            await self._exchange(writer)
            await writer.close()
        except ClientGone:
            self._record.reason = "client_gone"
        except ServiceError as error:
            if not writer.started:
                raise
            self._record.reason = str(error.code)
            await self._end(writer, error)
        except asyncio.CancelledError:
            # the server stops; this task ends here in any case, and the client should know why
            self._record.reason = str(Code.STOPPING)
            if not writer.started:
                raise ServiceStopping from None
            await self._end(writer, ServiceStopping())
        except Exception as error:
            if not writer.started:
                raise
            self._record.unexpected(error)
            await self._end(writer, UnforeseenError())

    async def _end(self, writer: ResponseWriter, error: ServiceError) -> None:
        if not writer.finished:
            if self._record.reached:
                error.facts.setdefault("reached", self._record.reached)
            words = self._last_words(error)
            if words is None:
                writer.break_off()
                return
            await writer.finish(words)
        try:
            async with asyncio.timeout(FAREWELL_SECONDS):
                await writer.close()
        except (TimeoutError, ClientGone):
            return


class AnswerSink(Protocol):
    """What an answer is written to, as ResponseWriter is."""

    async def start(self, media_type: str) -> None:
        """Send the head."""

    async def write(self, data: bytes) -> None:
        """Send bytes."""

    async def finish(self, data: bytes) -> None:
        """Send the last bytes."""


class EventWriter:
    """Server-sent events as OpenAI's clients read them: no `id:`, no `retry:`, a comment as keep-alive."""

    def __init__(self, writer: AnswerSink, *, ping_seconds: float) -> None:
        self._writer = writer
        self._ping_seconds = ping_seconds

    async def start(self) -> None:
        """Send the head."""
        await self._writer.start(EVENT_STREAM)

    async def send(self, event: BaseModel) -> None:
        """Send one event."""
        await self._writer.write(b"data: " + event.model_dump_json().encode() + b"\n\n")

    async def done(self) -> None:
        """Say that this was all."""
        await self._writer.finish(DONE)

    async def alive(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`; pings while it takes its time."""
        task = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait({task}, timeout=self._ping_seconds))[0]:
                await self._writer.write(PING)
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
