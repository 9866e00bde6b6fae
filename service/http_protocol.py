"""uvicorn's HTTP/1.1 protocol with bounds on the head, and with broken requests answered in our own words."""

import asyncio
import uuid
from collections.abc import Callable, Iterator
from enum import Enum, auto
from functools import partial
from typing import Any, ClassVar

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from service.errors import PROBLEM_JSON, Code, ServiceError
from service.exchange import BREAK_OFF, LAST_WORDS

__all__ = ["BoundedProtocol", "bounded_protocol"]

BROKEN_SECONDS = 30.0  # in which the client of an answer that breaks off may read what was written
LINGER_SECONDS = 1.0  # an answer before the whole request was read: closing at once would reset it away
_UPGRADE = b"upgrade:"


class _Reading(Enum):
    """What the next byte of a connection belongs to."""

    HEAD = auto()
    BODY = auto()
    NOTHING = auto()  # the request before is complete, and none has begun


class _HeadTooLarge(Exception):
    """Raised inside the parser's callbacks, which turn it into a parser error."""


class BoundedProtocol(HttpToolsProtocol):
    """What is not HTTP, a broken chunk in the middle of a body included, gets a problem document; or, when the
    answer streams already, the stream's own last words.
    """

    head_bytes: ClassVar[int] = 64 << 10
    head_seconds: ClassVar[float] = 30.0
    on_refused: ClassVar[Callable[[ServiceError, str], None]] = staticmethod(lambda *_: None)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._reading = _Reading.HEAD
        self._head_bytes = 0
        self._header_bytes = 0
        self._held = b""  # the beginning of a line that may be `Upgrade`
        self._line_begins = True
        self._answering: RequestResponseCycle | None = None  # `cycle` is the newest request, which may wait behind it
        self._head_timer: asyncio.TimerHandle | None = None
        self._refused = False
        self._too_large = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._leave()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """A client that sends no more counts as gone; but if its request is not whole, it is told."""
        head_began = self._reading is _Reading.HEAD and self._head_bytes > 0
        if not self._refused and (head_began or self._reading is _Reading.BODY):
            self.send_400_response("")
        return self._refused

    def data_received(self, data: bytes) -> None:
        began_in_head = self._reading is not _Reading.BODY
        for part in self._without_upgrade(data):
            if not self._refused:
                super().data_received(part)
        if self._refused:
            return
        if self._reading is _Reading.HEAD:
            self._head_bytes += len(data) if began_in_head else 0
            if self._head_bytes > self.head_bytes:
                self._too_large = True
                self.send_400_response("")
        # Blank lines between requests, and a body whose answer has been given, end uvicorn's wait for the next request.
        if self._reading is _Reading.HEAD or self.cycle is None or self.cycle.response_complete:
            self._start_timer()

    def _without_upgrade(self, data: bytes) -> Iterator[bytes]:
        """The same bytes, of a head line by line, without `Upgrade`: none is offered, and a server may ignore it.

        The parser would take the body of such a request, which some clients send first of all, for the new protocol.
        """
        data, self._held = self._held + data, b""
        while data and self._reading is not _Reading.BODY:
            line, newline, rest = data.partition(b"\n")
            begins = line[: len(_UPGRADE)].lower()
            if self._line_begins and not newline and _UPGRADE.startswith(begins):
                self._held = data
                return
            if not (self._line_begins and begins == _UPGRADE):
                yield line + newline
            self._line_begins, data = bool(newline), rest
        if data:
            yield data
            if self._reading is _Reading.HEAD:  # of a request that came right behind the body
                self._line_begins = data.endswith(b"\n")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._reading, self._head_bytes, self._header_bytes = _Reading.HEAD, 0, 0

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._count(name, value)

    def _count(self, *parts: bytes) -> None:
        self._header_bytes += sum(map(len, parts))
        if self._header_bytes > self.head_bytes:
            self._too_large = True
            raise _HeadTooLarge

    def on_headers_complete(self) -> None:
        self._reading = _Reading.BODY
        self._stop_timer()
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0":
            self.cycle.send = _Unframed(self.cycle).send  # type: ignore[method-assign]

    def on_message_complete(self) -> None:
        self._reading, self._line_begins = _Reading.NOTHING, True
        super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        cycle.scope.setdefault("state", {})[BREAK_OFF] = partial(self._break_off, cycle)
        super()._start_asgi_task(cycle, app)

    def send_400_response(self, msg: str) -> None:
        if self._too_large:
            self._refuse(
                ServiceError(
                    f"the head of the request has more than {self.head_bytes} bytes",
                    code=Code.HEAD_TOO_LARGE,
                    status=431,
                )
            )
        else:
            self._refuse(
                ServiceError("this is not valid HTTP/1.1, or the body broke off", code=Code.BAD_HTTP, status=400)
            )

    def _head_too_slow(self) -> None:
        if self._reading is _Reading.BODY:
            self.transport.close()  # it has its answer
            return
        self._refuse(
            ServiceError(
                f"the head of the request took more than {self.head_seconds:g} s", code=Code.BODY_TIMEOUT, status=408
            )
        )

    def _refuse(self, error: ServiceError) -> None:
        """Answer, let the client read it, close; the app sees a client that left."""
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        self._stop_timer()
        cycle = self._answering
        if cycle is None or cycle.response_complete:
            request_id = f"req-{uuid.uuid4().hex}"
            self.transport.write(_problem(error, request_id))
            type(self).on_refused(error, request_id)
        elif not cycle.response_started:
            record = cycle.scope.get("state", {}).get("record")
            self.transport.write(_problem(error, record.request_id if record else f"req-{uuid.uuid4().hex}"))
        elif words := cycle.scope.get("state", {}).get(LAST_WORDS):
            text = words(error)
            if text is not None:
                self.transport.write(_ended(text, chunked=bool(cycle.chunked_encoding)))
        elif cycle.chunked_encoding:
            self.transport.write(_ended(b"", chunked=True))
        self._leave()
        self.flow.resume_writing()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(LINGER_SECONDS, self.transport.close)

    def _break_off(self, cycle: RequestResponseCycle) -> None:
        """End the connection in the middle of an answer whose format has no words for what went wrong."""
        cycle.disconnected = True
        cycle.message_event.set()
        self.pipeline.clear()
        self.transport.close()
        self.loop.call_later(BROKEN_SECONDS, self.transport.abort)

    def _leave(self) -> None:
        """Tell the request that is answered that its client is gone; those that wait behind it never begin."""
        self.pipeline.clear()
        if self._answering is not None and not self._answering.response_complete:
            self._answering.disconnected = True
            self._answering.message_event.set()

    def _start_timer(self) -> None:
        if self._head_timer is None and not self._refused:
            self._head_timer = self.loop.call_later(self.head_seconds, self._head_too_slow)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


class _Unframed:
    """Sends to a client of HTTP/1.0, which knows no chunks: a body of unknown length ends with the connection."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._framed = cycle.send
        self._open_ended = False

    async def send(self, message: Any) -> None:
        """One message of the app, as uvicorn sends a body whose length it knows."""
        if message["type"] == "http.response.start":
            self._open_ended = not any(name.lower() == b"content-length" for name, _ in message.get("headers", []))
            if self._open_ended:
                self._cycle.chunked_encoding = False
        elif self._open_ended:
            self._cycle.expected_content_length = len(message.get("body", b""))
        await self._framed(message)


def bounded_protocol(
    *, head_bytes: int, head_seconds: float, on_refused: Callable[[ServiceError, str], None] = lambda *_: None
) -> type[BoundedProtocol]:
    """A protocol class for uvicorn's `http` option: the head of a request may have so many bytes and seconds.

    `on_refused` is told of what never became a request: the error and the id that the answer has.
    """
    values = {"head_bytes": head_bytes, "head_seconds": head_seconds, "on_refused": staticmethod(on_refused)}
    return type("ConfiguredProtocol", (BoundedProtocol,), values)


def _problem(error: ServiceError, request_id: str) -> bytes:
    body = error.body(request_id)
    head = (
        f"content-type: {PROBLEM_JSON}\r\ncontent-length: {len(body)}\r\n"
        f"x-request-id: {request_id}\r\nconnection: close\r\n\r\n"
    )
    return STATUS_LINE[error.status] + head.encode("ascii") + body


def _ended(words: bytes, *, chunked: bool) -> bytes:
    """The last words of an answer that streams, and its end."""
    if not chunked:
        return words
    return (b"%x\r\n%b\r\n" % (len(words), words) if words else b"") + b"0\r\n\r\n"
