"""One line of log per request, with its id, its sizes and the reason why it ended."""

import logging
import re
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TextIO

import structlog

from dist_attn.log_lines import LogFormat, line_processors
from dist_attn.store import ExpiryGrace

__all__ = ["LibraryLogs", "Log", "RequestRecord", "make_log", "warn_of_jump"]

Log = structlog.typing.FilteringBoundLogger
LOGGED_PATH = 300  # characters
_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


def make_log(stream: TextIO = sys.stderr, level: str = "info", form: LogFormat = "auto") -> Log:
    """A logger that writes to `stream`; made here and handed on, nothing global."""
    log: Log = structlog.wrap_logger(
        structlog.WriteLogger(stream),
        wrapper_class=structlog.make_filtering_bound_logger(level),
        processors=line_processors(stream, form),
    )
    return log


def warn_of_jump(log: Log, grace: ExpiryGrace, what: str) -> None:
    """Log that the wall clock has jumped, if it has since the last time, and what is kept longer because of it."""
    if jumped := grace.take_jump():
        log.warning(
            f"the wall clock jumped; no expired {what} is deleted until it has run evenly for waits.expired_seconds",
            jumped_seconds=round(jumped),
        )


class LibraryLogs(logging.Handler):
    """A handler that writes the records of libraries as lines of the service's log."""

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
    """The record of one request: filled while it runs, logged once when it ends.

    `reason` is "finished", an error code, or "client_gone". `received` counts the bytes of the body so far; the
    functions in `at_end` are called once, when the request has ended. `caller` tells callers apart: SHA-256 in hex of
    the key that it came with, "" where no keys are asked for. `address` is the client's; `may_hurry` says whether it
    may ask for the priority `high`. `reached` is what a stream that breaks off has given the client.
    """

    request_id: str
    method: str
    path: str
    log: Log
    reason: str = "finished"
    status: int = 0
    caller: str = ""
    address: str = ""
    may_hurry: bool = True
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
    def holder(self) -> str:
        """The key, or else the address, whose share of a shared limit this request counts towards."""
        return self.caller or self.address

    @property
    def seconds(self) -> float:
        """The seconds since the request's head was read."""
        return time.monotonic() - self.started

    def note(self, **facts: Any) -> None:
        """Add facts to the line."""
        self.facts.update(facts)

    def unexpected(self, error: BaseException) -> None:
        """Log an unforeseen error with its traceback, and name it as the reason."""
        self.reason = "internal_error"
        self.log.error("unexpected error", request_id=self.request_id, exc_info=error)

    def write(self, *, polled: bool) -> None:
        """Log the one line: at `debug` where a `polled` path was answered, "not ready" included, else at `info`."""
        quiet = polled and self.method in ("GET", "HEAD") and (self.status < 400 or self.status == 503)
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
