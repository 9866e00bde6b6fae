"""Structured log lines on stderr, one event each."""

import sys
from typing import TextIO

import structlog

from dist_attn.log_lines import LogFormat, line_processors

__all__ = ["configure_logs", "say"]


def configure_logs(process: str, level: str, form: LogFormat = "auto") -> None:
    """Write what is of `level` or worse to stderr; `process` names this process in each line."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            *line_processors(sys.stderr, form),
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
