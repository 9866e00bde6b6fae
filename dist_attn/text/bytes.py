"""The tokeniser without a vocabulary to learn: one token per byte."""

import hashlib
from pathlib import Path
from typing import final as final_class

import numpy as np
from numpy.typing import NDArray

from dist_attn.text.base import Bytes, Tokens, check_bytes
from dist_attn.text.hugging_face import write_tokenizer_json
from dist_attn.text.vocabulary import Vocabulary

__all__ = ["BYTE_PIECES", "ByteTokeniser"]

BYTE_PIECES = tuple(bytes([value]) for value in range(256))


@final_class
class ByteTokeniser:
    """Ids 0 to 255 are the bytes, 256 is the end token."""

    def __init__(self) -> None:
        self._vocabulary = Vocabulary(BYTE_PIECES)
        self.digest = hashlib.sha256(b"dist-attn byte tokeniser 1").hexdigest()

    @property
    def vocab_size(self) -> int:
        """How many ids there are, the end token included."""
        return self._vocabulary.size

    @property
    def end_token(self) -> int:
        """The id that ends a document; it stands for no bytes."""
        return self._vocabulary.end_token

    def encode_piece(self, data: Bytes, *, final: bool) -> tuple[NDArray[np.int32], int]:
        """The bytes as ids; all are consumed at once, whether `final` or not.

        Raises: TokenError if `data` is not bytes.
        """
        tokens = self.encode(data)
        return tokens, len(tokens)

    def encode_with_ends(self, data: Bytes, *, final: bool) -> tuple[NDArray[np.int32], NDArray[np.int64], int]:
        """`encode_piece`, and where in `data` each of the tokens ends."""
        tokens, consumed = self.encode_piece(data, final=final)
        return tokens, np.cumsum(self.byte_lengths(tokens)), consumed

    def encode(self, data: Bytes) -> NDArray[np.int32]:
        """The bytes as ids.

        Raises: TokenError if `data` is not bytes.
        """
        check_bytes(data)
        return np.frombuffer(data, dtype=np.uint8).astype(np.int32)

    def byte_lengths(self, tokens: Tokens) -> NDArray[np.int64]:
        """How many bytes each token stands for: 1, and 0 for the end token.

        Raises: TokenError for an id outside the vocabulary.
        """
        return self._vocabulary.byte_lengths(tokens)

    def decode(self, tokens: Tokens) -> bytes:
        """The bytes that the tokens stand for.

        Raises: TokenError for an id outside the vocabulary.
        """
        return self._vocabulary.decode(tokens)

    def save(self, folder: Path) -> None:
        """Write `tokenizer.json` into the folder, which is made if needed."""
        write_tokenizer_json(folder, self._vocabulary, merges=(), split_pattern=None)
