"""Structured log lines on stderr, one event each: JSON, or lines for people on a terminal."""

import os
import sys
from typing import Any, TextIO

import structlog

__all__ = ["configure_logs", "say"]


def configure_logs(process: str, level: str) -> None:
    """Write what is of `level` or worse to stderr; `process` names this process in each line."""
    render: list[Any] = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    if sys.stderr.isatty():
        render = [structlog.dev.ConsoleRenderer(colors=not os.environ.get("NO_COLOR"))]
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *render,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(process=process)


def say(line: str, stream: TextIO | None = None) -> None:
    """Write a line, on stdout unless told otherwise, in one piece: other processes write to the same pipe."""
    stream = sys.stdout if stream is None else stream
    stream.write(f"{line}\n")
    stream.flush()
