"""Byte-level BPE over a stream: our own bounded cut into pieces, then the merges of the `tokenizers` library.

Reference: Sennrich et al. 2016 (byte pair encoding); Radford et al. 2019 (on bytes, with a printable alphabet).
"""

import hashlib
import json
from pathlib import Path
from typing import TypeAlias
from typing import final as final_class

import numpy as np
from numpy.typing import NDArray
from tokenizers.models import BPE

from dist_attn.errors import TokenError
from dist_attn.text.base import Bytes, Tokens
from dist_attn.text.bytes import BYTE_PIECES
from dist_attn.text.hugging_face import printable, write_tokenizer_json
from dist_attn.text.pieces import PATTERN, TEXT_PATTERN, cut_blocks
from dist_attn.text.vocabulary import Vocabulary

__all__ = ["BpeTokeniser", "Merges"]

Merges: TypeAlias = tuple[tuple[bytes, bytes], ...]

# English prose has fewer distinct pieces than this; an entry takes about 200 bytes.
_CACHE_ENTRIES = 1 << 16


@final_class
class BpeTokeniser:
    """Ids 0 to 255 are the bytes, then one id for each merge that gave a new token, then the end token.

    One value may serve any number of threads.
    """

    def __init__(self, merges: Merges) -> None:
        pieces = _pieces_of(merges)
        self._vocabulary = Vocabulary(pieces)
        self._merges = merges
        ids = {printable(piece): number for number, piece in enumerate(pieces)}
        self._cached = _Cache(BPE(vocab=ids, merges=[(printable(a), printable(b)) for a, b in merges]))
        self.digest = _digest(merges)

    @property
    def merges(self) -> Merges:
        """The pairs that become one token, first learnt first."""
        return self._merges

    @property
    def vocabulary(self) -> Vocabulary:
        """The bytes of every id."""
        return self._vocabulary

    @property
    def vocab_size(self) -> int:
        """How many ids there are, the end token included."""
        return self._vocabulary.size

    @property
    def end_token(self) -> int:
        """The id that ends a document; it stands for no bytes."""
        return self._vocabulary.end_token

    def encode_piece(self, data: Bytes, *, final: bool) -> tuple[NDArray[np.int32], int]:
        """The tokens of the next piece of a stream, and how many of its bytes they cover.

        The caller keeps `data[consumed:]`, fewer than TAIL_BYTES, and puts it in front of the next piece. With
        `final` every byte is consumed.

        Raises: TokenError if `data` is not bytes.
        """
        out, consumed = bytearray(), 0
        for part in cut_blocks(data, final=final):
            out += b"".join(map(self._cached.__getitem__, part.pieces))
            consumed = part.stop
        return np.frombuffer(out, dtype=np.int32), consumed

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
        """How many bytes each token stands for; 0 for the end token.

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
        write_tokenizer_json(folder, self._vocabulary, self._merges, split_pattern=TEXT_PATTERN)


class _Cache(dict[bytes, bytes]):
    """From a piece to its ids as raw int32, so that a text is put together by one join; emptied when full."""

    def __init__(self, model: BPE) -> None:
        super().__init__()
        self._model = model

    def __missing__(self, piece: bytes) -> bytes:
        ids = np.array([token.id for token in self._model.tokenize(printable(piece))], dtype=np.int32).tobytes()
        if len(self) >= _CACHE_ENTRIES:
            self.clear()
        self[piece] = ids
        return ids


def _pieces_of(merges: Merges) -> tuple[bytes, ...]:
    """The bytes of every id but the end token's.

    Raises: TokenError when there is no merge, or one that joins tokens which no earlier merge has made.
    """
    if not merges:
        raise TokenError("a BPE tokeniser needs at least one merge; without any, use ByteTokeniser")
    pieces = dict.fromkeys(BYTE_PIECES)
    for rank, (first, second) in enumerate(merges):
        if first not in pieces or second not in pieces:
            raise TokenError(f"merge {rank} joins {first!r} and {second!r}, but no earlier merge makes both of them")
        pieces[first + second] = None
    return tuple(pieces)


def _digest(merges: Merges) -> str:
    canonical = {
        "kind": "dist-attn bpe 1",
        "pattern": PATTERN.decode("latin-1"),
        "merges": [[first.hex(), second.hex()] for first, second in merges],
    }
    return hashlib.sha256(json.dumps(canonical, sort_keys=True).encode()).hexdigest()
