"""Tokens in the order they came, in the pieces they came in."""

from collections import deque
from typing import final

import numpy as np

__all__ = ["TOKEN_BYTES", "TokenQueue"]

TOKEN_BYTES = 4


@final
class TokenQueue:
    """Tokens as raw little-endian int32; no piece is copied before it is taken."""

    def __init__(self) -> None:
        self._pieces: deque[memoryview] = deque()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def push(self, tokens: bytes) -> None:
        """Append the tokens."""
        if tokens:
            self._pieces.append(memoryview(tokens))
            self._count += len(tokens) // TOKEN_BYTES

    @property
    def first(self) -> int:
        """The first token; there must be one."""
        return int.from_bytes(self._pieces[0][:TOKEN_BYTES], "little")

    def take(self, count: int) -> bytes:
        """Remove and return the first `count` tokens; there must be as many."""
        return b"".join(self._first(count))

    def drop(self, count: int) -> None:
        """Remove the first `count` tokens; there must be as many."""
        self._first(count)

    def push_front(self, earlier: "TokenQueue") -> None:
        """Put all tokens of `earlier` before these; it is empty afterwards."""
        self._pieces.extendleft(reversed(earlier._pieces))
        self._count += earlier._count
        earlier._pieces.clear()
        earlier._count = 0

    def first_outside(self, vocab_size: int) -> int | None:
        """A token that is not in [0, vocab_size), or None."""
        for piece in self._pieces:
            tokens = np.frombuffer(piece, dtype="<i4")
            outside = tokens[(tokens < 0) | (tokens >= vocab_size)]
            if len(outside):
                return int(outside[0])
        return None

    def _first(self, count: int) -> list[memoryview]:
        needed = count * TOKEN_BYTES
        parts: list[memoryview] = []
        while needed:
            piece = self._pieces.popleft()
            if len(piece) > needed:
                self._pieces.appendleft(piece[needed:])
                piece = piece[:needed]
            parts.append(piece)
            needed -= len(piece)
        self._count -= count
        return parts
