"""Where the metrics of a run go: every sink gets every line, the first of them is metrics.jsonl."""

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, final

__all__ = ["CallbackSink", "JsonLines", "Metrics", "RunLog", "Sink"]

Metrics = dict[str, Any]
"""One report: `step`, and what was measured then (`loss`, `learning_rate`, `bits_per_byte`, …)."""


class Sink(Protocol):
    """Something that keeps or shows metrics."""

    def write(self, metrics: Metrics) -> None:
        """Take one report."""
        ...

    def close(self) -> None:
        """The run ends, in whatever way."""
        ...


@final
class JsonLines:
    """metrics.jsonl: one object per line, on disk as soon as it is known."""

    def __init__(self, path: Path) -> None:
        # Nothing waits in a buffer: what a full disk refuses is not tried again at the end.
        self._file = path.open("ab", buffering=0)

    def write(self, metrics: Metrics) -> None:
        """Append one line."""
        line = json.dumps(metrics).encode() + b"\n"
        while line:
            line = line[self._file.write(line) :]

    def close(self) -> None:
        """Close the file."""
        self._file.close()


@final
class CallbackSink:
    """A function that is called with each report, as the progress bar's is."""

    def __init__(self, report: Callable[[Metrics], None]) -> None:
        self._report = report

    def write(self, metrics: Metrics) -> None:
        """Pass it on."""
        self._report(metrics)

    def close(self) -> None:
        """Nothing to close."""


@final
class RunLog:
    """All sinks of a run as one; a context that closes them. Only the rank that writes files has any."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = tuple(sinks)
        self._closing = ExitStack()

    def write(self, metrics: Metrics) -> None:
        """Give one report to every sink."""
        for sink in self._sinks:
            sink.write(metrics)

    def __enter__(self) -> Self:
        for sink in self._sinks:
            self._closing.callback(sink.close)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.close()
