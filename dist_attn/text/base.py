"""The interface of every tokeniser, the table from ids to bytes that most of them have, and text from drawn tokens.

How much of a stream a caller may have to keep is part of the promise.
"""

import codecs
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from dist_attn.errors import TokenError

Bytes: TypeAlias = bytes | bytearray | memoryview
Tokens: TypeAlias = Sequence[int] | NDArray[np.integer]
TokenArray: TypeAlias = NDArray[np.int32]

TAIL_BYTES = 64
"""The most bytes that `encode_piece` may leave unconsumed; no cut between tokens looks further ahead than this.

Tokenisers that cannot give the bytes back (WordPiece) look at whole words, up to WORD_TAIL_BYTES.
"""

WORD_TAIL_BYTES = 1024


def check_bytes(data: Bytes) -> None:
    """Raise TokenError if `data` is text, or anything else that is not plain bytes."""
    if isinstance(data, memoryview) and data.contiguous and data.itemsize == 1 and data.ndim == 1:
        return
    if not isinstance(data, bytes | bytearray):
        raise TokenError(f"a tokeniser takes bytes; given was {type(data).__name__}. Encode text as UTF-8 first")


@dataclass(frozen=True)
class Vocabulary:
    """The bytes of each token, then, if it `ends`, the end token, which has the highest id and stands for no bytes."""

    pieces: tuple[bytes, ...]
    ends: bool = True

    @property
    def size(self) -> int:
        """The number of ids, the end token included."""
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
        """The number of bytes that each token stands for.

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


class Tokeniser(ABC):
    """A tokeniser of bytes to token ids and back; any bytes are accepted, and text never turns into the end token.

    Ids stand for the bytes of a table; a kind of tokeniser says how a stream is cut into tokens.
    """

    vocabulary: Vocabulary
    """The bytes of every id."""
    digest: str
    """Sha256 (hex) of everything that decides which tokens a text gives."""
    end_token: int | None
    """The id that ends a document; it stands for no bytes."""
    special_tokens: Mapping[str, int]
    """The id of each special token, by its text."""
    byte_tokens: frozenset[int] = frozenset()
    """Tokens of single bytes whose runs are text only where all of a run is UTF-8."""
    dropped_blanks: int = 0
    """The number of blanks at the beginning of a whole text that are no part of it."""

    @property
    def vocab_size(self) -> int:
        """The number of ids, the end token, special and unused ones included."""
        return self.vocabulary.size

    @property
    def token_ids(self) -> Mapping[str, int]:
        """The tokens that begin, end and pad texts, as far as there are any, under transformers' names for them.

        Here the end token, which also pads.
        """
        return {"eos_token_id": self.vocabulary.end_token, "pad_token_id": self.vocabulary.end_token}

    @abstractmethod
    def encode_piece(self, data: Bytes, *, final: bool) -> tuple[NDArray[np.int32], int]:
        """Encode the next piece of a stream; returns its tokens, and how many of its bytes they cover.

        The caller keeps `data[consumed:]` and puts it in front of the next piece: at most TAIL_BYTES, of words
        WORD_TAIL_BYTES, and all of a text by a `LibraryTokeniser`. With `final` every byte is consumed.

        Raises: TokenError if `data` is not bytes.
        """

    def encode_with_ends(self, data: Bytes, *, final: bool) -> tuple[NDArray[np.int32], NDArray[np.int64], int]:
        """Encode as `encode_piece`, and tell where in `data` each of the tokens ends.

        Bytes that no token stands for, such as blanks between words, lie before the end of the next one.
        """
        tokens, consumed = self.encode_piece(data, final=final)
        return tokens, np.cumsum(self.byte_lengths(tokens)), consumed

    def encode(self, data: Bytes) -> NDArray[np.int32]:
        """Encode a whole text, with the tokens that a stream gives.

        Raises: TokenError if `data` is not bytes.
        """
        return self.encode_piece(data, final=True)[0]

    @abstractmethod
    def encode_whole(self, data: Bytes, *, framed: bool) -> NDArray[np.int32]:
        """Encode a whole text that is a prompt; a folder of Hugging Face's gives the tokens of its AutoTokenizer.

        `framed`: with the tokens that the folder puts around every text.
        """

    @abstractmethod
    def encode_parts(self, parts: Sequence[str | int]) -> NDArray[np.int32]:
        """Encode a prompt of texts, which never become special tokens, and of special tokens between them."""

    def byte_lengths(self, tokens: Tokens) -> NDArray[np.int64]:
        """The number of bytes that each token stands for; 0 for the end token and other special ones.

        Raises: TokenError for an id outside the vocabulary.
        """
        return self.vocabulary.byte_lengths(tokens)

    def decode(self, tokens: Tokens) -> bytes:
        """The bytes that the tokens stand for.

        Raises: TokenError for an id outside the vocabulary.
        """
        return self.vocabulary.decode(tokens)

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write `tokenizer.json` into the folder, which is made if needed."""


class IncrementalDecoder:
    """A decoder that makes UTF-8 text token by token; bytes that are not UTF-8 become U+FFFD.

    `begins`: the tokens are a whole text, not what follows another one: together they give what the `tokenizers`
    library decodes, which leaves out the blank that a tokeniser has put before a text.
    """

    def __init__(self, tokeniser: Tokeniser, *, begins: bool = False) -> None:
        self._tokeniser = tokeniser
        self._begins = begins
        self._reset()

    def _reset(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._run = bytearray()  # of tokens of single bytes
        self._blanks = self._tokeniser.dropped_blanks if self._begins else 0

    def push(self, token: int) -> str:
        """Take one more token; returns the text that is certain, empty while a character or run of bytes is incomplete.

        Raises: TokenError for an id outside the vocabulary.
        """
        data = self._tokeniser.decode([token])
        if token in self._tokeniser.byte_tokens:
            self._run += data
            return ""
        if not data:
            return ""
        return self._without_blanks(self._take_run() + self._utf8.decode(data))

    def finish(self) -> str:
        """Return the rest of the text: U+FFFD if the last character is incomplete. The decoder then starts afresh."""
        text = self._without_blanks(self._take_run() + self._utf8.decode(b"", final=True))
        self._reset()
        return text

    def _take_run(self) -> str:
        run, self._run = self._run, bytearray()
        try:
            return run.decode("utf-8")
        except UnicodeDecodeError:
            return "\ufffd" * len(run)  # as the library has it

    def _without_blanks(self, text: str) -> str:
        while text and self._blanks:
            self._blanks -= 1
            if text[0] != " ":
                self._blanks = 0
            else:
                text = text[1:]
        return text
