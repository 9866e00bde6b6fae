"""uvicorn's HTTP/1.1 protocol with bounds on the head, and with broken requests answered in our own words."""

import asyncio
import uuid
from collections.abc import Callable
from typing import Any, ClassVar

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from service.errors import PROBLEM_JSON, Code, ServiceError
from service.exchange import LAST_WORDS

__all__ = ["BoundedProtocol", "bounded_protocol"]

LINGER_SECONDS = 1.0  # an answer before the whole request was read: closing at once would reset it away


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
        self._in_head = True
        self._head_bytes = 0
        self._header_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._refused = False
        self._too_large = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head_timer = self.loop.call_later(self.head_seconds, self._head_too_slow)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        began_in_head = self._in_head
        super().data_received(data)
        if self._in_head and not self._refused:
            self._head_bytes += len(data) if began_in_head else 0
            if self._head_bytes > self.head_bytes:
                self._too_large = True
                self.send_400_response("")
            elif self._head_timer is None:
                self._head_timer = self.loop.call_later(self.head_seconds, self._head_too_slow)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._head_bytes, self._header_bytes = True, 0, 0

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._header_bytes += len(name) + len(value)
        if self._header_bytes > self.head_bytes:
            self._too_large = True
            raise _HeadTooLarge

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._stop_timer()
        super().on_headers_complete()

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
        cycle = self.cycle
        answering = cycle is not None and cycle.response_started and not cycle.response_complete
        if cycle is None or cycle.response_complete:
            request_id = f"req-{uuid.uuid4().hex}"
            self.transport.write(_problem(error, request_id))
            type(self).on_refused(error, request_id)
        elif not answering:
            record = cycle.scope.get("state", {}).get("record")
            self.transport.write(_problem(error, record.request_id if record else f"req-{uuid.uuid4().hex}"))
        elif cycle.chunked_encoding:
            words = cycle.scope.get("state", {}).get(LAST_WORDS)
            last = words(error) if words else b""
            self.transport.write((b"%x\r\n%b\r\n" % (len(last), last) if last else b"") + b"0\r\n\r\n")
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
        self.flow.resume_writing()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(LINGER_SECONDS, self.transport.close)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


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
