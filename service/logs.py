"""One line of log per request, with its id, its sizes and the reason why it ended."""

import logging
import os
import re
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TextIO

import structlog

__all__ = ["LibraryLogs", "Log", "RequestRecord", "make_log"]

Log = structlog.typing.FilteringBoundLogger
HEALTH_CHECKS = ("/livez", "/readyz")
LOGGED_PATH = 300  # characters
_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


def make_log(stream: TextIO = sys.stderr, level: str = "info") -> Log:
    """A logger of JSON lines, on a terminal of lines for people; made here and handed on, nothing global."""
    render: list[Any] = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    if stream.isatty():
        render = [structlog.dev.ConsoleRenderer(colors=not os.environ.get("NO_COLOR"))]
    log: Log = structlog.wrap_logger(
        structlog.WriteLogger(stream),
        wrapper_class=structlog.make_filtering_bound_logger(level),
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *render,
        ],
    )
    return log


class LibraryLogs(logging.Handler):
    """What libraries log, in our lines."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record."""
        facts = {"exc_info": record.exc_info} if record.exc_info else {}
        self._log.log(record.levelno, record.getMessage(), logger=record.name, **facts)


def _none() -> int:
    return 0


@dataclass
class RequestRecord:
    """What is known about one request: filled while it runs, logged once when it ends.

    `reason` is "finished", an error code, or "client_gone". `received` tells the bytes of the body so far; what is
    in `at_end` is called once, when the request has ended. `caller` tells callers apart: SHA-256 in hex of the key
    that it came with, "" where no keys are asked for. `reached` is what a stream that breaks off has given the client.
    """

    request_id: str
    method: str
    path: str
    log: Log
    reason: str = "finished"
    status: int = 0
    caller: str = ""
    received: Callable[[], int] = _none
    sent: int = 0
    started: float = field(default_factory=time.monotonic)
    facts: dict[str, Any] = field(default_factory=dict)
    at_end: list[Callable[[], None]] = field(default_factory=list)
    reached: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def pick_id(offered: str | None) -> str:
        """The client's own id when it is short and plain, otherwise a new one."""
        return offered if offered and _ID.fullmatch(offered) else f"req-{uuid.uuid4().hex}"

    @property
    def seconds(self) -> float:
        """Since the request's head was read."""
        return time.monotonic() - self.started

    def note(self, **facts: Any) -> None:
        """Add facts to the line."""
        self.facts.update(facts)

    def unexpected(self, error: BaseException) -> None:
        """An error nobody foresaw: log it with its traceback, name it as the reason."""
        self.reason = "internal_error"
        self.log.error("unexpected error", request_id=self.request_id, exc_info=error)

    def write(self) -> None:
        """The one line; health checks and metrics, which are asked for every second, only for who debugs them."""
        quiet = self.path in HEALTH_CHECKS or (self.path == "/metrics" and self.reason == "finished")
        (self.log.debug if quiet else self.log.info)(
            "request",
            request_id=self.request_id,
            method=self.method,
            path=self.path[:LOGGED_PATH],
            status=self.status,
            reason=self.reason,
            seconds=round(self.seconds, 4),
            request_bytes=self.received(),
            response_bytes=self.sent,
            **self.facts,
        )
