"""Which tokens an append has fed: a digest of them up to any point that is still ahead, in bounded memory."""

import hashlib
from collections import deque
from typing import final

import numpy as np

from dist_attn.text.base import TokenArray


@final
class FedTokens:
    """The tokens of an append from its beginning at position `start`. Memory: those after the last point asked for."""

    def __init__(self, start: int) -> None:
        self._digest = hashlib.sha256()
        self._hashed = start
        self._waiting: deque[TokenArray] = deque()
        self.stop = start
        """The position after the last token."""

    def push(self, tokens: TokenArray) -> None:
        """The next tokens."""
        if len(tokens):
            self._waiting.append(tokens)
            self.stop += len(tokens)

    def digest_at(self, position: int) -> str:
        """SHA-256 in hex of the tokens before `position`, which is not before the point that was asked for last."""
        assert self._hashed <= position <= self.stop, (self._hashed, position, self.stop)
        while self._hashed < position:
            tokens = self._waiting.popleft()
            taken = min(len(tokens), position - self._hashed)
            if taken < len(tokens):
                self._waiting.appendleft(tokens[taken:])
            self._digest.update(np.ascontiguousarray(tokens[:taken], dtype="<i4").data)
            self._hashed += taken
        return self._digest.hexdigest()
