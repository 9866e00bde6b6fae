"""A run that is told to stop finishes its step and saves: SIGINT and SIGTERM, the first time."""

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType
from typing import final

__all__ = ["StopRequest", "stop_on_signals"]

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@final
class StopRequest:
    """Whether, and by which signal, the run was asked to stop."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def __call__(self) -> bool:
        """Whether to stop after this step."""
        return self.signal is not None


@contextlib.contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Inside, the first SIGINT or SIGTERM is a request to stop; a second one does what it did outside.

    Only the main thread may enter.
    """
    request = StopRequest()
    before = {number: signal.getsignal(number) for number in SIGNALS}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def ask(number: int, frame: FrameType | None) -> None:
        request.signal = signal.Signals(number)
        restore()

    for number in SIGNALS:
        signal.signal(number, ask)
    try:
        yield request
    finally:
        restore()
