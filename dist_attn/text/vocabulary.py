"""The table from token id to bytes, with its range check."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dist_attn.errors import TokenError
from dist_attn.text.base import Tokens

__all__ = ["Vocabulary"]


@dataclass(frozen=True)
class Vocabulary:
    """The bytes of each token, then, if it `ends`, the end token, which has the highest id and stands for no bytes."""

    pieces: tuple[bytes, ...]
    ends: bool = True

    @property
    def size(self) -> int:
        """How many ids there are, the end token included."""
        return len(self._table)

    @property
    def end_token(self) -> int:
        """The id of the end token."""
        return len(self.pieces)

    def decode(self, tokens: Tokens) -> bytes:
        """The bytes of the tokens, one after the other.

        Raises: TokenError for an id outside the vocabulary.
        """
        return b"".join(map(self._table.__getitem__, self._checked(tokens).tolist()))

    def byte_lengths(self, tokens: Tokens) -> NDArray[np.int64]:
        """How many bytes each token stands for.

        Raises: TokenError for an id outside the vocabulary.
        """
        return self._lengths[self._checked(tokens)]

    @cached_property
    def _table(self) -> tuple[bytes, ...]:
        return (*self.pieces, b"") if self.ends else self.pieces

    @cached_property
    def _lengths(self) -> NDArray[np.int64]:
        return np.array([len(piece) for piece in self._table], dtype=np.int64)

    def _checked(self, tokens: Tokens) -> NDArray[np.int64]:
        given = np.asarray(tokens)
        if not given.size:
            return np.empty(0, dtype=np.int64)
        if given.ndim != 1 or given.dtype.kind not in "iu":
            raise TokenError(
                f"token ids come as one row of whole numbers; given was shape {given.shape} of {given.dtype}"
            )
        outside = (given < 0) | (given >= self.size)
        if outside.any():
            raise TokenError(
                f"token id {int(given[outside][0])} is not in the vocabulary; ids run from 0 to {self.size - 1}"
            )
        return given.astype(np.int64, copy=False)
