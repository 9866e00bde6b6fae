"""What every tokeniser promises: the protocol, and how much of a stream a caller may have to keep."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dist_attn.errors import TokenError

__all__ = ["TAIL_BYTES", "WORD_TAIL_BYTES", "Bytes", "TokenArray", "Tokeniser", "Tokens", "check_bytes"]

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
