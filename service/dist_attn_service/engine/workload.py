"""The documents that this process has in the engine or waiting for it, and what they mean for a new one."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from math import inf

from dist_attn_service.engine.speed import EngineSpeed, TextRatio

__all__ = ["DocumentLoad", "Workload"]


class DocumentLoad:
    """One document on its way through the engine, of `expected` tokens if that is known."""

    def __init__(self, workload: "Workload", expected: float | None) -> None:
        self._workload = workload
        self.expected = inf if expected is None else expected
        self.done_tokens = 0

    @property
    def remaining(self) -> float:
        """Tokens to come; infinite where nobody knows."""
        return max(0.0, self.expected - self.done_tokens)

    def waiting(self) -> AbstractContextManager[None]:
        """It waits for the engine, not for its client."""
        return self._workload.speed.waiting()

    def tokenised(self, tokens: int, size: int) -> None:
        """So many tokens came of so many bytes."""
        self._workload.ratio.add(tokens, size)

    def done(self, upto: int) -> None:
        """The tokens before this one have been read."""
        new = max(0, upto - self.done_tokens)
        self.done_tokens += new
        self._workload.speed.done(new)


class Workload:
    """What is under way, and what was measured of it."""

    def __init__(self) -> None:
        self.speed = EngineSpeed()
        self.ratio = TextRatio()
        self._documents: set[DocumentLoad] = set()

    @contextmanager
    def document(self, *, size: int | None = None, tokens: float | None = None) -> Iterator[DocumentLoad]:
        """A document is under way, of so many bytes or tokens as far as they are known."""
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
        """How many tokens of others are read before a new document of so many is done: long ones take turns."""
        return sum(min(document.remaining, tokens) for document in self._documents)
