"""A tokenizer.json that another program wrote: what its tokenisers share, whatever their model is."""

import hashlib
import json
from abc import abstractmethod
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from dist_attn.errors import ModelFolderError
from dist_attn.text.base import TAIL_BYTES, Bytes, TableTokeniser, Vocabulary, check_bytes
from dist_attn.text.hugging_face import FILE_NAME, write_tokenizer_config

MAX_PIECE_BYTES = TAIL_BYTES - 8
"""A character that is cut at the end of the bytes looked at, and one that a pattern looks ahead to, fit behind it."""

_BLOCK_BYTES = 1 << 16
_CACHE_ENTRIES = 1 << 16


class ForeignTokeniser(TableTokeniser):
    """The tokens of a foreign tokenizer.json; its special tokens, the end token among them, stand for no bytes.

    One value may serve any number of threads.

    Raises: ModelFolderError for contents of another kind, saying which is supported.
    """

    supported: ClassVar[str]

    def __init__(self, contents: dict[str, Any], end_text: str | None, name: str = FILE_NAME) -> None:
        try:
            self._check(contents)
            # Text never becomes an added token, so the library does not hear of any; nor does it cut, pad or frame.
            bare: dict[str, Any] = {"added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
            self._tokenizer = Tokenizer.from_str(json.dumps(contents | bare))
            self._vocabulary = Vocabulary(self._table(contents), ends=False)
            ids = {token["content"]: int(token["id"]) for token in contents["added_tokens"]} | ids_of(contents)
        except Exception as error:  # the library raises no narrower type
            detail = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise ModelFolderError(f"{name}: {detail}; supported is {self.supported}") from None
        self._contents, self._end_text = contents, end_text
        self._end_token: int | None = None if end_text is None else ids.get(end_text)
        self.digest = hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()

    @property
    def contents(self) -> dict[str, Any]:
        """The file as it was read."""
        return self._contents

    @property
    def end_token(self) -> int | None:
        """The id that ends a document, if the folder names one."""
        return self._end_token

    def padded(self, vocab_size: int) -> Self:
        """With unused ids up to `vocab_size`: models are often padded to a round number of tokens.

        Raises: ModelFolderError where there are more ids already.
        """
        if vocab_size < self.vocab_size:
            raise ModelFolderError(
                f"{FILE_NAME} has {self.vocab_size} tokens and config.json says vocab_size {vocab_size}; needed are "
                "at least as many as tokens"
            )
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        more = [{"id": n, "content": f"<|unused-{n}|>"} | flags for n in range(self.vocab_size, vocab_size)]
        contents = self._contents | {"added_tokens": [*self._contents["added_tokens"], *more]}
        return type(self)(contents, self._end_text)

    def ending_with(self, token: int) -> Self:
        """With this special token as the end of a document.

        Raises: ModelFolderError where there is no such special token.
        """
        for added in self._contents["added_tokens"]:
            if added["id"] == token and added["special"]:
                return type(self)(self._contents, added["content"])
        raise ModelFolderError(f"{FILE_NAME} has no special token {token}, which config.json names as eos_token_id")

    def save(self, folder: Path) -> None:
        """Write `tokenizer.json` and, with the end token's name, `tokenizer_config.json`."""
        write_tokenizer_config(folder, self._end_text)
        (folder / FILE_NAME).write_text(json.dumps(self._contents, ensure_ascii=False, indent=1) + "\n", "utf-8")

    @staticmethod
    @abstractmethod
    def _check(contents: dict[str, Any]) -> None:
        """Raises: ValueError or KeyError for anything that would give other tokens than ours."""

    @staticmethod
    @abstractmethod
    def _table(contents: dict[str, Any]) -> tuple[bytes, ...]:
        """The bytes of every id; none for special tokens and for numbers that no token has."""


class PiecewiseTokeniser(ForeignTokeniser):
    """A foreign tokeniser whose text is cut into short pieces, each of which has the same tokens wherever it stands."""

    def __init__(self, contents: dict[str, Any], end_text: str | None, name: str = FILE_NAME) -> None:
        super().__init__(contents, end_text, name)
        self._cached: dict[str, bytes] = {}  # raw int32; emptied when full

    def encode_piece(self, data: Bytes, *, final: bool) -> tuple[NDArray[np.int32], int]:
        check_bytes(data)
        out, size, start = bytearray(), len(data), 0
        while start < size and (final or size - start >= TAIL_BYTES):
            end = min(start + _BLOCK_BYTES, size)
            start += self._encode_block(bytes(data[start:end]), final and end == size, out)
        return np.frombuffer(bytes(out), dtype=np.int32), start

    @abstractmethod
    def _encode_block(self, data: bytes, final: bool, out: bytearray) -> int:
        """Append the tokens of the pieces that these bytes decide; how many bytes they cover."""

    def _ids(self, piece: str) -> bytes:
        """The ids of a piece as raw int32."""
        ids = self._cached.get(piece)
        if ids is None:
            ids = np.array(self._tokenise(piece), dtype=np.int32).tobytes()
            if len(self._cached) >= _CACHE_ENTRIES:
                self._cached.clear()
            self._cached[piece] = ids
        return ids

    def _tokenise(self, piece: str) -> list[int]:
        return [token.id for token in self._tokenizer.model.tokenize(piece)]


def ids_of(contents: dict[str, Any]) -> dict[str, int]:
    """The id of every token of the model; of Unigram, whose file has a list with scores, its place."""
    vocab = contents["model"]["vocab"]
    if isinstance(vocab, list):
        return {str(text): number for number, (text, _) in enumerate(vocab)}
    return {str(text): int(number) for text, number in vocab.items()}
