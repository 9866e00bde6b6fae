"""The documents that this process has in the engine or waiting for it, the delay that they mean for a new one, and two
recent measures: how fast the engine reads while a request waits for it, and tokens per byte of text.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

__all__ = ["DocumentLoad", "EngineSpeed", "Ratio", "Speed", "TextRatio", "Workload"]

INTERVAL_SECONDS = 0.5  # of waiting, at least
INTERVALS = 64
LEAST_TOKENS = 4096  # fewer say little: they are one or two steps
LEAST_SPREAD = 0.05  # no machine is steadier
LEAST_RATIO_SPREAD, FEW_PIECES = 0.01, 0.25


@dataclass(frozen=True)
class Speed:
    """The tokens per second of all that is read at the same time, and the share by which a document's may differ."""

    tokens_per_second: float
    spread: float


class EngineSpeed:
    """The tokens that came back, over the time in which work waited for the engine and not for a slow client."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waiting = 0
        self._since = 0.0
        self._tokens = 0
        self._seconds = 0.0
        self._past: deque[tuple[int, float]] = deque(maxlen=INTERVALS)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time of the block as waiting for the engine."""
        self._tick()
        self._waiting += 1
        try:
            yield
        finally:
            self._tick()
            self._waiting -= 1

    def done(self, tokens: int) -> None:
        """Count tokens that came back, if a request waits."""
        self._tick()
        if self._waiting:
            self._tokens += tokens
            if self._seconds >= INTERVAL_SECONDS:
                self._past.append((self._tokens, self._seconds))
                self._tokens, self._seconds = 0, 0.0

    def measured(self) -> Speed | None:
        """The speed of the last half minute or so of work; None before anything was measured."""
        tokens = self._tokens + sum(part[0] for part in self._past)
        seconds = self._seconds + sum(part[1] for part in self._past)
        if tokens < LEAST_TOKENS or seconds <= 0:
            return None
        mean = tokens / seconds
        past = sum(part[1] for part in self._past)
        if not past:
            return Speed(mean, FEW_PIECES)
        variance = sum(took * (count / took - mean) ** 2 for count, took in self._past) / past
        return Speed(mean, max(LEAST_SPREAD, 2 * math.sqrt(variance / len(self._past)) / mean))

    def _tick(self) -> None:
        now = self._clock()
        if self._waiting:
            self._seconds += now - self._since
        self._since = now


@dataclass(frozen=True)
class Ratio:
    """The tokens per byte of text, and the share by which those of another text of this kind may differ."""

    tokens_per_byte: float
    spread: float


class TextRatio:
    """Tokens over bytes of the pieces of text that were tokenised lately."""

    def __init__(self) -> None:
        self._pieces: deque[tuple[int, int]] = deque(maxlen=INTERVALS)

    def add(self, tokens: int, size: int) -> None:
        """Count a piece of text."""
        if size > 0:
            self._pieces.append((tokens, size))

    def measured(self, least_bytes: int = 1) -> Ratio | None:
        """The ratio over the last pieces; None before so many bytes were tokenised."""
        tokens, size = sum(piece[0] for piece in self._pieces), sum(piece[1] for piece in self._pieces)
        if size < least_bytes or not tokens:
            return None
        mean = tokens / size
        if tokens == size and all(count == part for count, part in self._pieces):
            return Ratio(mean, 0.0)  # a token per byte, always
        variance = sum(part * (count / part - mean) ** 2 for count, part in self._pieces) / size
        # two standard errors of the mean; a single piece says nothing about how texts vary
        spread = 2 * math.sqrt(variance / len(self._pieces)) / mean if len(self._pieces) > 1 else FEW_PIECES
        return Ratio(mean, max(LEAST_RATIO_SPREAD, spread))


class DocumentLoad:
    """One document on its way through the engine, of `expected` tokens if that is known."""

    def __init__(self, workload: "Workload", expected: float | None) -> None:
        self._workload = workload
        self.expected = math.inf if expected is None else expected
        self.done_tokens = 0

    @property
    def remaining(self) -> float:
        """Tokens to come; infinite where their number is not known."""
        return max(0.0, self.expected - self.done_tokens)

    def waiting(self) -> AbstractContextManager[None]:
        """Count the time of the block as waiting for the engine, not for the client."""
        return self._workload.speed.waiting()

    def tokenised(self, tokens: int, size: int) -> None:
        """Count a piece of text that was tokenised."""
        self._workload.ratio.add(tokens, size)

    def done(self, upto: int) -> None:
        """Note that the tokens before position `upto` have been read."""
        new = max(0, upto - self.done_tokens)
        self.done_tokens += new
        self._workload.speed.done(new)


class Workload:
    """The documents under way, and the measures of them."""

    def __init__(self) -> None:
        self.speed = EngineSpeed()
        self.ratio = TextRatio()
        self._documents: set[DocumentLoad] = set()

    @contextmanager
    def document(self, *, size: int | None = None, tokens: float | None = None) -> Iterator[DocumentLoad]:
        """Count a document as under way for the block; `size` in bytes or `tokens`, as far as they are known."""
        ratio = self.ratio.measured()
        if tokens is None and size is not None and ratio is not None:
            tokens = size * ratio.tokens_per_byte
        load = DocumentLoad(self, tokens)
        self._documents.add(load)
        try:
            yield load
        finally:
            self._documents.discard(load)

    def tokens_before(self, tokens: float) -> float:
        """The tokens of other documents that are read before a new one of `tokens` is done: long ones take turns."""
        return sum(min(document.remaining, tokens) for document in self._documents)
