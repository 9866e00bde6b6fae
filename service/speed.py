"""How fast the engine reads, as measured while somebody waits for it, and what that says of work to come."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

__all__ = ["EngineSpeed", "Speed"]

INTERVAL_SECONDS = 0.5  # of waiting, at least
INTERVALS = 64
LEAST_TOKENS = 4096  # fewer say little: they are one or two steps
LEAST_SPREAD = 0.05  # nobody's machine is steadier


@dataclass(frozen=True)
class Speed:
    """Tokens per second of all that was read at the same time, and by which share a long document's may differ."""

    tokens_per_second: float
    spread: float


class EngineSpeed:
    """Tokens that came back over the time in which the engine, and not a slow client, was what work waited for."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waiting = 0
        self._since = 0.0
        self._tokens = 0
        self._seconds = 0.0
        self._past: deque[tuple[int, float]] = deque(maxlen=INTERVALS)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Somebody waits for the engine."""
        self._tick()
        self._waiting += 1
        try:
            yield
        finally:
            self._tick()
            self._waiting -= 1

    def done(self, tokens: int) -> None:
        """So many tokens came back; they count while somebody waits."""
        self._tick()
        if self._waiting:
            self._tokens += tokens
            if self._seconds >= INTERVAL_SECONDS:
                self._past.append((self._tokens, self._seconds))
                self._tokens, self._seconds = 0, 0.0

    def measured(self) -> Speed | None:
        """The speed of the last half minute or so of work; None before anything was measured."""
        past = [*self._past, *([(self._tokens, self._seconds)] if self._seconds else [])]
        tokens, seconds = sum(part[0] for part in past), sum(part[1] for part in past)
        if tokens < LEAST_TOKENS or seconds <= 0:
            return None
        mean = tokens / seconds
        variance = sum(took * (count / took - mean) ** 2 for count, took in past) / seconds
        return Speed(mean, max(LEAST_SPREAD, 2 * math.sqrt(variance / len(past)) / mean))

    def _tick(self) -> None:
        now = self._clock()
        if self._waiting:
            self._seconds += now - self._since
        self._since = now
