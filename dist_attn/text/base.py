"""What every tokeniser promises, the table from ids to bytes that most of them have, and text from drawn tokens.

How much of a stream a caller may have to keep is part of the promise.
"""

import codecs
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dist_attn.errors import TokenError

Bytes: TypeAlias = bytes | bytearray | memoryview
Tokens: TypeAlias = Sequence[int] | NDArray[np.integer]
TokenArray: TypeAlias = NDArray[np.int32]

TAIL_BYTES = 64
"""Bytes that `encode_piece` may leave unconsumed, at most; no cut between tokens looks further ahead than this.

Tokenisers that cannot give the bytes back (WordPiece) look at whole words, up to WORD_TAIL_BYTES.
"""

WORD_TAIL_BYTES = 1024


def check_bytes(data: Bytes) -> None:
    """Raises TokenError if `data` is text, or anything else that is not plain bytes."""
    if isinstance(data, memoryview) and data.contiguous and data.itemsize == 1 and data.ndim == 1:
        return
    if not isinstance(data, bytes | bytearray):
        raise TokenError(f"a tokeniser takes bytes; given was {type(data).__name__}. Encode text as UTF-8 first")


class Tokeniser(Protocol):
    """Bytes to token ids and back; any bytes are accepted, and text never turns into the end token."""

    @property
    def vocab_size(self) -> int:
        """How many ids there are, the end token included."""
        ...

    @property
    def end_token(self) -> int | None:
        """The id that ends a document; it stands for no bytes."""
        ...

    @property
    def digest(self) -> str:
        """Sha256 (hex) of everything that decides which tokens a text gives."""
        ...

    def encode_piece(self, data: Bytes, *, final: bool) -> tuple[NDArray[np.int32], int]:
        """The tokens of the next piece of a stream, and how many of its bytes they cover.

        The caller keeps `data[consumed:]`, at most TAIL_BYTES (of words WORD_TAIL_BYTES), and puts it in front of the
        next piece. The function keeps nothing between calls. With `final` every byte is consumed.
        """
        ...

    def encode_with_ends(self, data: Bytes, *, final: bool) -> tuple[NDArray[np.int32], NDArray[np.int64], int]:
        """`encode_piece`, and where in `data` each of the tokens ends.

        Bytes that no token stands for, such as blanks between words, lie before the end of the next one.
        """
        ...

    def encode(self, data: Bytes) -> NDArray[np.int32]:
        """The tokens of a whole text."""
        ...

    def byte_lengths(self, tokens: Tokens) -> NDArray[np.int64]:
        """How many bytes each token stands for.

        Raises: TokenError for an id outside the vocabulary.
        """
        ...

    def decode(self, tokens: Tokens) -> bytes:
        """The bytes that the tokens stand for.

        Raises: TokenError for an id outside the vocabulary.
        """
        ...

    def save(self, folder: Path) -> None:
        """Write `tokenizer.json` into the folder, which is made if needed."""
        ...


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
        ids = np.asarray(tokens)
        if not ids.size:
            return np.empty(0, dtype=np.int64)
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise TokenError(f"token ids come as one row of whole numbers; given was shape {ids.shape} of {ids.dtype}")
        outside = (ids < 0) | (ids >= self.size)
        if outside.any():
            raise TokenError(
                f"token id {int(ids[outside][0])} is not in the vocabulary; ids run from 0 to {self.size - 1}"
            )
        return ids.astype(np.int64, copy=False)


class TableTokeniser(ABC):
    """A tokeniser whose ids stand for the bytes of a table; a kind of it says how a stream is cut into tokens."""

    _vocabulary: Vocabulary

    @abstractmethod
    def encode_piece(self, data: Bytes, *, final: bool) -> tuple[NDArray[np.int32], int]:
        """The tokens of the next piece of a stream, and how many of its bytes they cover.

        The caller keeps `data[consumed:]`, fewer than TAIL_BYTES (of words at most WORD_TAIL_BYTES), and puts it in
        front of the next piece. With `final` every byte is consumed.

        Raises: TokenError if `data` is not bytes.
        """

    @property
    def vocab_size(self) -> int:
        """How many ids there are, the end token, special and unused ones included."""
        return self._vocabulary.size

    def encode_with_ends(self, data: Bytes, *, final: bool) -> tuple[NDArray[np.int32], NDArray[np.int64], int]:
        """`encode_piece`, and where in `data` each of the tokens ends."""
        tokens, consumed = self.encode_piece(data, final=final)
        return tokens, np.cumsum(self.byte_lengths(tokens)), consumed

    def encode(self, data: Bytes) -> NDArray[np.int32]:
        """The tokens of a whole text.

        Raises: TokenError if `data` is not bytes.
        """
        return self.encode_piece(data, final=True)[0]

    def byte_lengths(self, tokens: Tokens) -> NDArray[np.int64]:
        """How many bytes each token stands for; 0 for the end token and other special ones.

        Raises: TokenError for an id outside the vocabulary.
        """
        return self._vocabulary.byte_lengths(tokens)

    def decode(self, tokens: Tokens) -> bytes:
        """The bytes that the tokens stand for.

        Raises: TokenError for an id outside the vocabulary.
        """
        return self._vocabulary.decode(tokens)


class IncrementalDecoder:
    """UTF-8 text, token by token; bytes that are not UTF-8 become U+FFFD."""

    def __init__(self, tokeniser: Tokeniser) -> None:
        self._tokeniser = tokeniser
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """The text that is certain after one more token; empty while a character is incomplete.

        Raises: TokenError for an id outside the vocabulary.
        """
        return self._utf8.decode(self._tokeniser.decode([token]))

    def finish(self) -> str:
        """What is left: U+FFFD if the last character never became whole. The decoder then starts afresh."""
        text = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return text
