"""One HTTP exchange: the body of a request comes in while its answer goes out, each with one owner."""

import asyncio
import re
import time
import zlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dist_attn_service.base.errors import (
    BadRequest,
    ClientGone,
    Code,
    ServiceError,
    ServiceStopping,
    TooLarge,
    UnforeseenError,
)
from dist_attn_service.base.logs import RequestRecord
from dist_attn_service.base.tasks import stop_tasks, task_group

T = TypeVar("T")
EVENT_STREAM = "text/event-stream; charset=utf-8"
PING = b": ping\n"  # one newline: a blank line would end an event, which the official client then tries to parse
DONE = b"data: [DONE]\n\n"
FAREWELL_SECONDS = 1.0
GZIP_PIECE_BYTES = 64 << 10
GZIP_READ_BYTES = 4 << 10  # zlib copies the bytes that follow the end of a member
GZIP_EMPTY_MEMBERS = 1000  # files that were put together may have some; each costs as much as a page of text
GZIP_FREE_BYTES = 16 << 20  # a body may always unpack to so much
GZIP_MOST_TIMES = 200  # text shrinks to a tenth, the most repetitive logs to a hundredth, and zeros to a thousandth
LAST_WORDS = "last_words"  # the key in the scope's state of the function that gives an answer's last bytes for an error
BREAK_OFF = "break_off"  # the key of the server's function that closes the connection in mid-answer
RELEASE_WRITER = "release_writer"  # the key of its function that lets the last bytes out to a slow client
_RANGE = re.compile(r"[ \t]*bytes=[ \t]*([0-9]{0,18})-([0-9]{0,18})[ \t]*", re.IGNORECASE)


class RequestBody:
    """The one owner of `receive`, which gives the body's bytes, and after them only the news that the client left.

    At most one task uses it at a time. `bytes` counts those that arrived: of a body in gzip, fewer than `chunks` gives.
    """

    def __init__(self, receive: Receive, *, idle_seconds: float, gzip: bool = False) -> None:
        self._receive = receive
        self.gzip = gzip
        self._idle_seconds = idle_seconds
        self.ended = False
        self.answered = False  # `receive` reports the end of the answer as a disconnect
        self.bytes = 0
        self.heard = time.monotonic()

    async def chunks(self) -> AsyncGenerator[bytes]:
        """The body as it arrives, unpacked.

        Raises: ClientGone when it breaks off, ServiceError (408) when nothing arrives for too long, BadRequest for
            broken gzip, TooLarge for gzip that grows beyond all measure.
        """
        async with aclosing(_gunzipped(self._arriving()) if self.gzip else self._arriving()) as chunks:
            async for chunk in chunks:
                yield chunk

    async def _arriving(self) -> AsyncGenerator[bytes]:
        while not self.ended:
            try:
                async with asyncio.timeout(self._idle_seconds):
                    message = await self._receive()
            except TimeoutError:
                raise ServiceError(
                    f"no byte of the body arrived for {self._idle_seconds:g} s; send it without such a pause",
                    code=Code.BODY_TIMEOUT,
                ) from None
            if message["type"] == "http.disconnect":
                raise ClientGone
            self.heard = time.monotonic()
            chunk: bytes = message.get("body", b"")
            self.bytes += len(chunk)
            self.ended = not message.get("more_body", False)
            if chunk:
                yield chunk

    async def read_all(self, limit: int, take: Callable[[int], None] = lambda _: None) -> bytes:
        """The whole body, for JSON; `take` is told of every piece before it is kept.

        Raises: TooLarge over `limit` bytes, BadRequest for an empty body, and what `take` and `chunks` raise.
        """
        data = bytearray()
        async for chunk in self.chunks():
            take(len(chunk))
            data += chunk
            if len(data) > limit:
                raise TooLarge(
                    f"a JSON body may have {limit} bytes; send a long text as text/plain to /v1/encodings instead"
                )
        if not data:
            raise BadRequest("the body is empty; a JSON object was needed", code=Code.EMPTY_INPUT)
        return bytes(data)

    async def until_gone(self) -> None:
        """Wait until the client leaves or has its answer; what it still sends is dropped.

        Raises: ClientGone when it left before.
        """
        while True:
            message = await self._receive()
            if self.answered:
                return
            if message["type"] == "http.disconnect":
                raise ClientGone
            self.heard = time.monotonic()
            self.ended = self.ended or not message.get("more_body", False)


async def _gunzipped(chunks: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    """Unpack a stream in gzip, of one or more members, in pieces of at most GZIP_PIECE_BYTES.

    Raises: BadRequest for a stream that is broken, cut off, followed by something else or has more than
        GZIP_EMPTY_MEMBERS, TooLarge for one that grows beyond GZIP_MOST_TIMES its size.
    """
    member, arrived, unpacked = zlib.decompressobj(zlib.MAX_WBITS | 16), 0, 0
    begun, empty = 0, 0  # the bytes unpacked before this member, and the number of members that held nothing
    async with aclosing(chunks):
        async for chunk in chunks:
            arrived, at, more = arrived + len(chunk), 0, False
            while at < len(chunk) or more:
                data = chunk[at : at + GZIP_READ_BYTES]
                if member.eof:
                    padding = len(data) - len(data.lstrip(b"\0"))  # gzip allows it
                    if padding:
                        at += padding
                        continue
                    empty += unpacked == begun
                    if empty > GZIP_EMPTY_MEMBERS:
                        text = f"the body in gzip has more than {GZIP_EMPTY_MEMBERS} members that hold nothing"
                        raise BadRequest(f"{text}; leave them out")
                    member, begun = zlib.decompressobj(zlib.MAX_WBITS | 16), unpacked
                try:
                    piece = member.decompress(data, GZIP_PIECE_BYTES)
                except zlib.error as error:
                    raise BadRequest(f"the body is not gzip, as its Content-Encoding says ({error})") from None
                at += len(data) - len(member.unconsumed_tail or member.unused_data)
                unpacked += len(piece)
                if unpacked > max(GZIP_FREE_BYTES, GZIP_MOST_TIMES * arrived):
                    raise TooLarge(
                        f"the body in gzip holds more than {GZIP_MOST_TIMES} times its own bytes; send it unpacked"
                    )
                more = len(piece) == GZIP_PIECE_BYTES and not member.eof  # there may be more of it inside zlib
                if piece:
                    yield piece
                if piece or member.eof:
                    await asyncio.sleep(0)  # a small body may hold much, or many members; other tasks get their turn
    if arrived and not member.eof:
        raise BadRequest("the body in gzip ends before its end; send all of it")


async def while_connected(body: RequestBody, work: Awaitable[T]) -> T:
    """The result of `work`, unless the client leaves first: then the work is cancelled and ClientGone raised."""
    async with task_group() as group:
        watcher = group.create_task(body.until_gone())
        result = await work
        watcher.cancel()
    return result


class ResponseWriter:
    """The one owner of `send`; knows whether the head has been sent and the body ended."""

    def __init__(
        self, send: Send, body: RequestBody, *, stall_seconds: float, break_off: Callable[[], None] = lambda: None
    ) -> None:
        self._send = send
        self._break_off = break_off
        self._body = body
        self._stall_seconds = stall_seconds
        self.started = False
        self.finished = False
        self._last: bytes | None = None

    async def start(
        self, media_type: str, length: int | None = None, more: dict[str, str] | None = None, status: int = 200
    ) -> None:
        """Send the head of a streamed answer, whose body has `length` bytes if that is known, with more headers."""
        self.started = True
        headers = {"content-type": media_type, "cache-control": "no-store", "x-accel-buffering": "no", **(more or {})}
        if length is not None:
            headers["content-length"] = str(length)
        await self._send({"type": "http.response.start", "status": status, "headers": Headers(headers).raw})

    async def write(self, data: bytes) -> None:
        """Send bytes as soon as the client takes them.

        Raises: ClientGone when the client neither reads nor sends for too long.
        """
        await self._deliver({"type": "http.response.body", "body": data, "more_body": True})

    async def finish(self, data: bytes = b"") -> None:
        """End the body with these bytes; `close` sends them."""
        self.finished = self._body.answered = True
        self._last = data

    async def close(self) -> None:
        """Send the last bytes, if there are any, and the end of the body.

        Called when the exchange holds nothing any more: a client that sends its next request after the last byte
        must not be refused for places and memory that this one still holds.

        Raises: ClientGone when the client neither reads nor sends for too long.
        """
        if self._last is not None:
            await self._deliver({"type": "http.response.body", "body": self._last, "more_body": False})
            self._last = None

    def break_off(self) -> None:
        """Send what was written and close the connection: the client sees a body without its end."""
        self.finished = self._body.answered = True
        self._break_off()

    async def _deliver(self, message: dict[str, object]) -> None:
        """Send a message: `send` waits for a slow client before it writes, so it may be cancelled and tried again."""
        since = time.monotonic()
        while True:
            try:
                async with asyncio.timeout(self._stall_seconds):
                    return await self._send(message)
            except TimeoutError:
                if time.monotonic() - max(since, self._body.heard) >= self._stall_seconds:
                    raise ClientGone from None


class StreamedResponse(Response):
    """A response that runs an exchange. It never calls `receive`: the exchange's RequestBody owns it.

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
        except asyncio.CancelledError:
            # the server stops; this task ends here in any case, and the client should know why
            if not writer.started:
                raise ServiceStopping from None
            await self._end(writer, ServiceStopping(), scope)
        except Exception as error:
            if not writer.started:
                raise
            if isinstance(error, ClientGone):
                self._record.reason = "client_gone"
            elif isinstance(error, ServiceError):
                await self._end(writer, error, scope)
            else:
                self._record.unexpected(error)
                await self._end(writer, UnforeseenError(), scope)

    async def _end(self, writer: ResponseWriter, error: ServiceError, scope: Scope) -> None:
        self._record.reason = str(error.code)
        if not writer.finished:
            if self._record.reached:
                error.facts.setdefault("reached", self._record.reached)
            words = self._last_words(error)
            if words is None:
                writer.break_off()
                return
            await writer.finish(words)
        scope["state"].get(RELEASE_WRITER, lambda: None)()
        try:
            async with asyncio.timeout(FAREWELL_SECONDS):
                await writer.close()
        except (TimeoutError, ClientGone):
            return


class AnswerSink(Protocol):
    """A writer of answers, such as ResponseWriter."""

    async def start(self, media_type: str) -> None:
        """Send the head."""

    async def write(self, data: bytes) -> None:
        """Send bytes."""

    async def finish(self, data: bytes) -> None:
        """Send the last bytes."""


class EventWriter:
    """A writer of server-sent events as OpenAI's clients read them: no `id:`, no `retry:`, a comment as keep-alive."""

    def __init__(self, writer: AnswerSink, *, ping_seconds: float) -> None:
        self._writer = writer
        self._ping_seconds = ping_seconds

    async def start(self) -> None:
        """Send the head."""
        await self._writer.start(EVENT_STREAM)

    async def send(self, event: object) -> None:
        """Send one event as JSON, under its type where it has one."""
        kind = event.get("type") if isinstance(event, dict) else None
        head = b"" if kind is None else f"event: {kind}\n".encode()
        await self._writer.write(head + b"data: " + msgspec.json.encode(event) + b"\n\n")

    async def done(self) -> None:
        """End the stream with `[DONE]`."""
        await self._writer.finish(DONE)

    async def alive(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, with pings to the client while it lasts."""
        task = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait({task}, timeout=self._ping_seconds))[0]:
                await self._writer.write(PING)
            return task.result()
        finally:
            if not task.done():
                await stop_tasks(task)


def byte_range(header: str | None, size: int) -> tuple[int, int] | None:
    """The first byte that a Range header asks for, and the one after the last; None to send all (RFC 9110, section 14).

    A header that is no range of bytes, or several of them, is ignored, as a server may.

    Raises: ServiceError (416) for a range without a byte of the file.
    """
    found = _RANGE.fullmatch(header or "")
    if found is None or found[1] == found[2] == "":
        return None
    if not found[1]:
        start, stop = max(0, size - int(found[2])), size
    else:
        start, stop = int(found[1]), min(size, int(found[2]) + 1 if found[2] else size)
        if found[2] and int(found[2]) < start:
            return None
    if start >= stop:
        raise ServiceError(
            f"Range {(header or '')[:60]!r} holds no byte of a file of {size} bytes",
            code=Code.INVALID_VALUE,
            status=416,
            param="Range",
            headers={"content-range": f"bytes */{size}"},
        )
    return start, stop
