"""The form of log lines: JSON for programs, words for a person at a terminal."""

import os
import sys
from typing import Any, Literal, TextIO

LogFormat = Literal["auto", "plain", "json"]


def line_processors(stream: TextIO, form: LogFormat = "auto") -> list[Any]:
    """The processors that make a line of an event; `auto` is plain where `stream` is a terminal and JSON elsewhere.

    A plain line has the local time of day and no colours where NO_COLOR is set or no terminal is.
    """
    import structlog  # which takes longer to load than many a program that only says a line

    terminal = stream.isatty()
    if form == "json" or (form == "auto" and not terminal):
        shape: list[Any] = [
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ]
    else:
        colours = terminal and not os.environ.get("NO_COLOR")
        shape = [
            structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False),
            structlog.dev.ConsoleRenderer(
                colors=colours,
                pad_event_to=0,
                pad_level=False,
                sort_keys=False,
                exception_formatter=structlog.dev.plain_traceback,  # without the values of locals, which may be texts
            ),
        ]
    return [structlog.processors.add_log_level, *shape]


def configure_logs(process: str, level: str, form: LogFormat = "auto", **more: str) -> None:
    """Write what is of `level` or worse to stderr; `process`, and what is given more, stand in each line."""
    import structlog

    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            *line_processors(sys.stderr, form),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(process=process, **more)


def say(line: str, stream: TextIO | None = None) -> None:
    """Write a line, on stdout unless told otherwise, in one piece: other processes write to the same pipe."""
    stream = sys.stdout if stream is None else stream
    stream.write(f"{line}\n")
    stream.flush()
