"""A tokenizer.json that another program wrote: the part of its tokenisers that does not depend on their model."""

import hashlib
import json
import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from math import prod
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from dist_attn.errors import ModelFolderError, TokenError, TokeniserError
from dist_attn.text.base import TAIL_BYTES, Bytes, Tokeniser, Vocabulary, check_bytes
from dist_attn.text.hugging_face import FILE_NAME, write_tokenizer_config
from dist_attn.text.whole_text import DECIDING, WholeText, content_of

MAX_PIECE_BYTES = TAIL_BYTES - 8
"""The bytes of the longest piece, which leave room for a character cut at the end and one looked ahead to."""

_BLOCK_BYTES = 1 << 16
_CACHE_ENTRIES = 1 << 16

MOST_IDS = 1 << 24
"""The most ids of a vocabulary, which is a table with a place for every id."""
MOST_GROWTH = 64
"""The most times that a text may grow before it is cut into tokens."""

NOT_UTF8 = re.compile("[\udc80-\udcff]")
"""The bytes that are no UTF-8, where these were decoded with `surrogateescape`."""


class ForeignTokeniser(Tokeniser):
    """A tokeniser of a foreign tokenizer.json; its special tokens, the end token among them, stand for no bytes.

    One value may serve any number of threads.

    Raises: ModelFolderError for contents of another kind, saying which is supported.
    """

    supported: ClassVar[str]

    def __init__(
        self,
        contents: dict[str, Any],
        end_text: str | None,
        name: str = FILE_NAME,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        self._name = name
        try:
            self._check(contents)
            _check_growth(contents)
            # A stream never has added tokens, so the library does not hear of any; nor does it cut, pad or frame.
            bare: dict[str, Any] = {"added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
            self._about = {"eos_token": end_text} if about is None else dict(about)
            with self._in_library():
                self._tokenizer = Tokenizer.from_str(json.dumps(contents | bare))
                self._whole = WholeText(contents, self._about)
                size = 1 + max(self._whole.library.get_vocab().values())
                last = max([size - 1, *(int(token["id"]) for token in contents.get("added_tokens") or ())])
                if last >= MOST_IDS:
                    raise ValueError(f"its ids run to {last}; needed are ids below {MOST_IDS}")
                table = self._table(contents)
            self.vocabulary = Vocabulary((*table, *[b""] * (size - len(table))), ends=False)
        except Exception as error:  # the library raises no narrower type
            detail = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise ModelFolderError(f"{name}: {detail}; supported is {self.supported}") from None
        self._contents, self._end_text = contents, end_text
        self.byte_tokens, self.dropped_blanks = self._whole.byte_tokens, self._whole.dropped_blanks
        self.special_tokens = self._whole.special_tokens
        self.end_token = None if end_text is None else self._whole.library.token_to_id(end_text)
        self.digest = hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()

    @property
    def token_ids(self) -> Mapping[str, int]:
        """The tokens that the folder names to begin, end and pad texts; where it names none to pad, the end token."""
        texts = {name: content_of(self._about.get(name)) for name in ("bos_token", "eos_token", "pad_token")}
        texts |= {"eos_token": self._end_text, "pad_token": texts["pad_token"] or self._end_text}
        ids = {f"{name}_id": self._whole.library.token_to_id(text) for name, text in texts.items() if text}
        return {name: token for name, token in ids.items() if token is not None}

    def encode_whole(self, data: Bytes, *, framed: bool) -> NDArray[np.int32]:
        """Encode as transformers' AutoTokenizer does: normalised, with the names of added tokens read as these.

        `framed`: with the tokens that the files put around every text. Memory: some 100 bytes for each token.

        Raises: TokenError if `data` is not bytes, and for a token that the model does not have; TokeniserError.
        """
        check_bytes(data)
        with self._in_library():
            return self._known(self._whole.encode(bytes(data).decode("utf-8", "replace"), framed=framed))

    def frame(self) -> tuple[list[int], list[int]]:
        """The tokens that the file puts before and behind every text. Raises: TokeniserError."""
        with self._in_library():
            framed, bare = (self._whole.encode("a", framed=framed).tolist() for framed in (True, False))
        before = next((at for at in range(len(framed)) if framed[at : at + len(bare)] == bare), 0)
        return framed[:before], framed[before + len(bare) :]

    def encode_parts(self, parts: Sequence[str | int]) -> NDArray[np.int32]:
        """Encode a prompt of texts, which never become special tokens, and of special tokens between them.

        Raises: TokenError for a token that the model does not have; TokeniserError.
        """
        with self._in_library():
            return self._known(self._whole.encode_parts(parts))

    @contextmanager
    def _in_library(self) -> Iterator[None]:
        """Raises: TokeniserError where the `tokenizers` library fails or panics in the block."""
        try:
            yield
        except BaseException as error:
            # It raises no narrower type, and a panic, such as of a pattern that backtracks too often, is no Exception.
            if type(error) is not Exception and type(error).__name__ != "PanicException":
                raise
            raise TokeniserError(f"{self._name} cannot read this text: {error}; give another one, or mend it") from None

    def _known(self, tokens: NDArray[np.int32]) -> NDArray[np.int32]:
        beyond = tokens[tokens >= self.vocab_size]
        if len(beyond):
            number = int(beyond[0])
            raise TokenError(
                f"the text has the token {self._whole.library.id_to_token(number)!r} with id {number}, and the model's "
                f"ids run to {self.vocab_size - 1}; leave it out of the text"
            )
        return tokens

    def cut_to(self, vocab_size: int) -> Self:
        """Fit the tokeniser to a model of fewer tokens: a text with an added token beyond those is refused.

        Raises: ModelFolderError where there are others, or one that frames or ends texts.
        """
        needed = {*self._whole.library.get_vocab(with_added_tokens=False).values()}  # what streams may give
        needed |= {token for part in self.frame() for token in part} | {self.end_token or 0}
        if max(needed) >= vocab_size:
            raise ModelFolderError(
                f"{FILE_NAME} has {self.vocab_size} tokens, the model {vocab_size}; needed are at most as many, beside "
                "added tokens that neither frame nor end a text, so the files are of two models"
            )
        shorter = copy(self)
        shorter.vocabulary = Vocabulary(self.vocabulary.pieces[:vocab_size], ends=False)
        return shorter

    def padded(self, vocab_size: int) -> Self:
        """Add unused ids up to `vocab_size`: models are often padded to a round number of tokens.

        Raises: ModelFolderError where there are more ids already, or would be far too many.
        """
        if vocab_size < self.vocab_size:
            raise ModelFolderError(
                f"{FILE_NAME} has {self.vocab_size} tokens and config.json says vocab_size {vocab_size}; needed are "
                "at least as many as tokens"
            )
        if vocab_size > MOST_IDS:
            raise ModelFolderError(f"config.json says vocab_size {vocab_size}; needed are at most {MOST_IDS}")
        unused = [b""] * (vocab_size - self.vocab_size)
        wider = copy(self)
        wider.vocabulary = Vocabulary((*self.vocabulary.pieces, *unused), ends=False)
        return wider

    def ending_with(self, token: int) -> Self:
        """Make this special token the end of a document.

        Raises: ModelFolderError where there is no such special token.
        """
        for added in self._contents["added_tokens"]:
            if added["id"] == token and added["special"]:
                text = added["content"]
                return type(self)(self._contents, text, about=self._about | {"eos_token": text})
        raise ModelFolderError(f"{FILE_NAME} has no special token {token}, which config.json names as eos_token_id")

    def save(self, folder: Path) -> None:
        """Write `tokenizer.json` and `tokenizer_config.json`, with what decides about the tokens."""
        kept = {name: value for name, value in self._about.items() if name in DECIDING and value is not None}
        write_tokenizer_config(folder, self._end_text, kept)
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

    def __init__(self, contents: dict[str, Any], end_text: str | None, *more: Any, **options: Any) -> None:
        super().__init__(contents, end_text, *more, **options)
        self._cached: dict[str, bytes] = {}  # raw int32; emptied when full

    def encode_piece(self, data: Bytes, *, final: bool) -> tuple[NDArray[np.int32], int]:
        check_bytes(data)
        out, size, start = bytearray(), len(data), 0
        with self._in_library():
            while start < size and (final or size - start >= TAIL_BYTES):
                end = min(start + _BLOCK_BYTES, size)
                start += self._encode_block(bytes(data[start:end]), final and end == size, out)
        return np.frombuffer(bytes(out), dtype=np.int32), start

    @abstractmethod
    def _encode_block(self, data: bytes, final: bool, out: bytearray) -> int:
        """Append the tokens of the pieces that these bytes decide; returns how many bytes they cover."""

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


def _check_growth(contents: dict[str, Any]) -> None:
    """Raises: ValueError for steps that make texts, or tokens that are drawn, so long that no memory holds them."""
    for part in ("normalizer", "decoder"):
        growth = _growth(contents.get(part))
        if growth > MOST_GROWTH:
            raise ValueError(f"its {part} makes texts {growth:,.0f} times as long; needed are at most {MOST_GROWTH}")


def _growth(step: Any) -> float:
    match step:
        case {"type": "Sequence", "normalizers": list() as steps} | {"type": "Sequence", "decoders": list() as steps}:
            return prod(map(_growth, steps))
        case {"type": "Replace", "pattern": {"String": str() as old}, "content": str() as new} if old:
            return max(1.0, len(new) / len(old))
        case {"type": "Replace", "content": str() as new}:  # a pattern may match between any two characters
            return 1.0 + len(new)
    return 1.0


def ids_of(contents: dict[str, Any]) -> dict[str, int]:
    """The id of every token of the model; of Unigram, whose file has a list with scores, its place."""
    vocab = contents["model"]["vocab"]
    if isinstance(vocab, list):
        return {str(text): number for number, (text, _) in enumerate(vocab)}
    return {str(text): int(number) for text, number in vocab.items()}


def byte_ends(text: str) -> NDArray[np.int64]:
    """The places in the bytes where characters end; one that stands for a byte that is no UTF-8 has length 1."""
    if text.isascii():
        return np.arange(1, len(text) + 1, dtype=np.int64)
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
    lengths = 1 + (points >= 0x80).astype(np.int64) + (points >= 0x800) + (points >= 0x10000)
    lengths[(points >= 0xDC80) & (points <= 0xDCFF)] = 1
    return np.cumsum(lengths)
