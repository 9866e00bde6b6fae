"""uvicorn's HTTP/1.1 protocol with bounds on the head, and with broken requests answered in our own words.

It is built on names of uvicorn that are not documented, so pyproject.toml bounds its version, and a test says which of
them a new version lacks.
"""

import asyncio
import uuid
from collections import deque
from collections.abc import Callable
from enum import Enum, auto
from functools import partial
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any, ClassVar

from httptools import HttpParserUpgrade, HttpRequestParser
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from dist_attn_service.base.errors import PROBLEM_JSON, Code, ServiceError
from dist_attn_service.http.exchange import BREAK_OFF, LAST_WORDS, RELEASE_WRITER

__all__ = ["BoundedProtocol", "bounded_protocol"]

UNREAD_SECONDS = 300.0  # for a client to take the rest of its answer
LINGER_SECONDS = 3.0  # for a client to send the rest of a request that is answered already, and then to read the answer
LINGER_BYTES = 256 << 20  # of that rest
PIPELINED = 32  # requests that may wait for the answer to one before them; a read has room for thousands
LINE_BYTES = 4  # of a header beside its name and value: the colon, a blank, CR and LF


class _Reading(Enum):
    """The part of a request that the next byte of a connection belongs to."""

    HEAD = auto()
    BODY = auto()
    NOTHING = auto()  # the request before is complete, and none has begun


class _Refused(Exception):
    """A refusal inside the parser's callbacks, which turn it into a parser error."""


class _Parser(HttpRequestParser):
    """A parser that reads past an offer to upgrade: no other protocol is spoken here, and a server may ignore it.

    The parser of httptools ends such a request with its head and leaves the rest of the bytes to the other protocol. So
    it is given the same head again without the offer, and then the rest.
    """

    def __init__(self, protocol: HttpToolsProtocol) -> None:
        self._protocol = protocol
        self._begin()

    def _begin(self) -> None:
        super().__init__(self._protocol)
        self.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn has it

    def feed_data(self, data: bytes | bytearray | memoryview) -> None:  # type: ignore[override]
        """Parse the next bytes of the connection.

        Raises: HttpParserError.
        """
        rest = memoryview(data)  # whose parts are no copies
        while True:
            try:
                return super().feed_data(rest)
            except HttpParserUpgrade as stopped:
                rest = rest[stopped.args[0] :]
            head = self._without_upgrade()
            self._begin()
            super().feed_data(head)

    def _without_upgrade(self) -> bytes:
        """The head that was read last, without `Upgrade`."""
        lines = [b"%b %b HTTP/%b" % (self.get_method(), self._protocol.url, self.get_http_version().encode())]
        lines += [b"%b: %b" % header for header in self._protocol.headers if header[0] != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])


class BoundedProtocol(HttpToolsProtocol):
    """A protocol that answers bytes that are not HTTP, broken chunks of a body included, with a problem document; or,
    when the answer streams already, with the stream's own last words.
    """

    head_bytes: ClassVar[int] = 64 << 10
    head_seconds: ClassVar[float] = 30.0
    on_refused: ClassVar[Callable[[ServiceError, str], None]] = staticmethod(lambda *_: None)
    stopping: ClassVar[Callable[[], bool]] = staticmethod(lambda: False)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parser = _Parser(self)
        self._reading = _Reading.NOTHING
        self._request_ended = False  # or a piece of a body was read, in the bytes that are being read
        self._head_bytes = 0  # of reads since then: of a head, or of a body's trailer, that has not ended
        self._header_bytes = 0  # of headers that are whole
        self._requests: deque[RequestResponseCycle] = deque()  # the one that is being answered, and those after it
        self._head_timer: asyncio.TimerHandle | None = None
        self._over = False  # what still comes is dropped
        self._dropped_bytes = 0
        self._end_timers: list[asyncio.TimerHandle] = []
        self._refusal: ServiceError | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        for timer in self._end_timers:
            timer.cancel()
        self._leave()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Count a client that sends no more as gone; if its request is not whole, tell it."""
        if not self._over and self._reading is not _Reading.NOTHING:
            self.send_400_response("")
        return False  # closes once all is written

    def data_received(self, data: bytes) -> None:
        if self._over:
            self._drop(data)
            return
        self._request_ended = False
        super().data_received(data)
        if not self._request_ended:
            self._head_bytes += len(data)
            if self._head_bytes > self.head_bytes:
                self._refuse(self._head_too_large())
        # Blank lines between requests, and a body whose answer has been given, end uvicorn's wait for the next request.
        if self._reading is _Reading.HEAD or self.cycle is None or self.cycle.response_complete:
            self._start_timer()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._reading, self._head_bytes, self._header_bytes, self._dropped_bytes = _Reading.HEAD, 0, 0, 0

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + LINE_BYTES)
        if self._reading is _Reading.HEAD:  # a trailer of a body is no header
            super().on_header(name, value)

    def _count(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > self.head_bytes:
            self._refusal = self._head_too_large()
            raise _Refused

    def on_body(self, body: bytes) -> None:
        if self.cycle.response_complete:
            self._drop(body)
        super().on_body(body)
        self._request_ended, self._head_bytes = True, 0

    def on_headers_complete(self) -> None:
        self._head_bytes -= self._header_bytes  # the bytes of these reads beyond the head may be a trailer's
        self._refusal = self._wrong_head()
        if self._refusal is not None:
            raise _Refused
        if self.parser.should_upgrade():
            return  # the parser reads it again
        self._reading = _Reading.BODY
        self._stop_timer()
        super().on_headers_complete()
        self.cycle.keep_alive &= not type(self).stopping()
        self.cycle.transport = SimpleNamespace(  # type: ignore[assignment]
            write=self.transport.write, is_closing=self.transport.is_closing, close=self._close
        )
        self.scope["state"][BREAK_OFF] = partial(self._break_off, self.cycle)
        self.scope["state"][RELEASE_WRITER] = self.flow.resume_writing
        if self.scope["http_version"] == "1.0":
            self.cycle.send = _Unframed(self.cycle).send  # type: ignore[method-assign]
        while self._requests and self._requests[0].response_complete:
            self._requests.popleft()
        self._requests.append(self.cycle)

    def _wrong_head(self) -> ServiceError | None:
        """The refusal of a head that can be parsed but makes no request; None for one that does."""
        version, method = self.parser.get_http_version(), self.parser.get_method()
        hosts = [value for name, value in self.headers if name == b"host"]
        codings = b",".join(value for name, value in self.headers if name == b"transfer-encoding").decode("latin-1")
        if version not in ("1.0", "1.1"):
            return _bad_http(f"HTTP/{version} is not spoken here; send HTTP/1.1", 505)
        if method == b"CONNECT":
            return _bad_http("CONNECT asks for a proxy, and this is none")
        if len(hosts) > 1 or (version == "1.1" and not hosts):
            return _bad_http(f"the request has {len(hosts)} headers Host, and HTTP/{version} asks for one")
        if codings and version == "1.0":
            return _bad_http("HTTP/1.0 has no Transfer-Encoding; send Content-Length, or HTTP/1.1")
        if codings and codings.strip().lower() != "chunked":
            return _bad_http(f"Transfer-Encoding: {codings[:40]} is not offered; send chunked alone", 501)
        if len(self.pipeline) >= PIPELINED:
            return _bad_http(f"{PIPELINED} requests wait for the answer before them; wait for it before sending more")
        return None

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._reading, self._request_ended = _Reading.NOTHING, True
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if not self._over:
            super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(self._refusal or _bad_http("this is not valid HTTP/1.1, or the body broke off"))

    def _head_too_large(self) -> ServiceError:
        return ServiceError(f"the head of the request has more than {self.head_bytes} bytes", code=Code.HEAD_TOO_LARGE)

    def _head_too_slow(self) -> None:
        if self._reading is _Reading.BODY:
            self.transport.close()  # it has its answer
            return
        self._refuse(
            ServiceError(f"the head of the request took more than {self.head_seconds:g} s", code=Code.BODY_TIMEOUT)
        )

    def _refuse(self, error: ServiceError) -> None:
        """Answer with an error, let the client read it, close; the app sees a client that left."""
        if self._over or self.transport.is_closing():
            return
        cycle = next((one for one in self._requests if not one.response_complete), None)
        if cycle is None:
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
        self._close(linger=True)

    def _break_off(self, cycle: RequestResponseCycle) -> None:
        """End the connection in the middle of an answer whose format has no words for what went wrong."""
        cycle.disconnected = True
        cycle.message_event.set()
        self.pipeline.clear()
        self._close()

    def last_answer(self) -> None:
        """Make the answers to the requests that have begun the last ones of the connection."""
        for cycle in self._requests:
            cycle.keep_alive = False

    def shutdown(self) -> None:
        """Close now, or after the answer to the request that has begun."""
        self.last_answer()
        if self._reading is not _Reading.HEAD and (self.cycle is None or self.cycle.response_complete):
            self._close()

    def _close(self, *, linger: bool = False) -> None:
        """Close once all that was written is sent.

        Where the client may still be sending, its bytes are read and dropped for a while: an earlier close would reset
        the connection, and the client would lose bytes that it has not received yet.
        """
        if self._over or self.transport.is_closing():
            return
        self._over = True
        self._stop_timer()
        if linger or self._reading is not _Reading.NOTHING or self.pipeline:
            self.flow.resume_reading()
            self.transport.write_eof()
            self._end_timers.append(self.loop.call_later(LINGER_SECONDS, self.transport.close))
        else:
            self.transport.close()
        self._end_timers.append(self.loop.call_later(UNREAD_SECONDS, self.transport.abort))

    def _drop(self, data: bytes) -> None:
        """Read on for a client that has its answer, within a bound."""
        self._dropped_bytes += len(data)
        if self._dropped_bytes > LINGER_BYTES:
            self.transport.close()

    def _leave(self) -> None:
        """Tell the request that is being answered that its client is gone; those that wait after it never begin."""
        self.pipeline.clear()
        for cycle in self._requests:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()

    def _start_timer(self) -> None:
        if self._head_timer is None and not self._over:
            self._head_timer = self.loop.call_later(self.head_seconds, self._head_too_slow)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


class _Unframed:
    """A sender to a client of HTTP/1.0, which knows no chunks: a body of unknown length ends with the connection."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._framed = cycle.send
        self._open_ended = False

    async def send(self, message: Any) -> None:
        """Send one message of the app, as uvicorn sends a body whose length it knows."""
        if message["type"] == "http.response.start":
            self._open_ended = not any(name.lower() == b"content-length" for name, _ in message.get("headers", []))
            if self._open_ended:
                self._cycle.chunked_encoding = False
        elif self._open_ended:
            self._cycle.expected_content_length = len(message.get("body", b""))
        await self._framed(message)


def bounded_protocol(
    *,
    head_bytes: int,
    head_seconds: float,
    on_refused: Callable[[ServiceError, str], None] = lambda *_: None,
    stopping: Callable[[], bool] = lambda: False,
) -> type[BoundedProtocol]:
    """A protocol class for uvicorn's `http` option: the head of a request may have so many bytes and seconds.

    `on_refused` gets the error and the id of each answer to bytes that never became a request. Once the service is
    `stopping`, each connection ends with the next answer.
    """
    values = {
        "head_bytes": head_bytes,
        "head_seconds": head_seconds,
        "on_refused": staticmethod(on_refused),
        "stopping": staticmethod(stopping),
    }
    return type("ConfiguredProtocol", (BoundedProtocol,), values)


def _problem(error: ServiceError, request_id: str) -> bytes:
    body = error.body(request_id)
    head = (
        f"content-type: {PROBLEM_JSON}\r\ncontent-length: {len(body)}\r\n"
        f"x-request-id: {request_id}\r\nconnection: close\r\n\r\n"
    )
    line = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n"
    return (line + head).encode("ascii") + body


def _bad_http(message: str, status: int = 400) -> ServiceError:
    return ServiceError(message, code=Code.BAD_HTTP, status=status)


def _ended(words: bytes, *, chunked: bool) -> bytes:
    """The last words of an answer that streams, and its end."""
    if not chunked:
        return words
    return (b"%x\r\n%b\r\n" % (len(words), words) if words else b"") + b"0\r\n\r\n"
