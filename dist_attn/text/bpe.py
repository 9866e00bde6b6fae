"""This project's own tokenisers: one token per byte, and byte-level BPE over a stream, learnt from files.

BPE is our own bounded cut into pieces, then the merges of the `tokenizers` library.

Reference: Sennrich et al. 2016 (byte pair encoding); Radford et al. 2019 (on bytes, with a printable alphabet).
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeAlias
from typing import final as final_class

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.trainers import BpeTrainer

from dist_attn.errors import InputError, TokenError
from dist_attn.text.base import Bytes, Tokeniser, Vocabulary, check_bytes
from dist_attn.text.hugging_face import END_TEXT, printable, write_tokenizer_json
from dist_attn.text.pieces import PATTERN, TEXT_PATTERN, cut_blocks

BYTE_PIECES = tuple(bytes([value]) for value in range(256))


class _OwnTokeniser(Tokeniser):
    """A tokeniser whose end token has the highest id."""

    end_token: int

    def __init__(self, vocabulary: Vocabulary, digest: str) -> None:
        self.vocabulary, self.digest = vocabulary, digest
        self.end_token = vocabulary.end_token
        self.special_tokens = {END_TEXT: self.end_token}

    def encode_whole(self, data: Bytes, *, framed: bool) -> NDArray[np.int32]:
        """Encode as `encode` does: nothing is put around a text, and no text is a special token.

        Raises: TokenError if `data` is not bytes.
        """
        return self.encode(data)

    def encode_parts(self, parts: Sequence[str | int]) -> NDArray[np.int32]:
        """Encode texts, with end tokens between them."""
        rows = [np.array([part], np.int32) if isinstance(part, int) else self.encode(part.encode()) for part in parts]
        return np.concatenate([np.empty(0, np.int32), *rows])


@final_class
class ByteTokeniser(_OwnTokeniser):
    """A tokeniser of bytes: ids 0 to 255 are the bytes, 256 is the end token."""

    def __init__(self) -> None:
        super().__init__(Vocabulary(BYTE_PIECES), hashlib.sha256(b"dist-attn byte tokeniser 1").hexdigest())

    def encode_piece(self, data: Bytes, *, final: bool) -> tuple[NDArray[np.int32], int]:
        """Return the bytes as ids; all are consumed at once, whether `final` or not.

        Raises: TokenError if `data` is not bytes.
        """
        check_bytes(data)
        return np.frombuffer(data, dtype=np.uint8).astype(np.int32), len(data)

    def save(self, folder: Path) -> None:
        """Write `tokenizer.json` into the folder, which is made if needed."""
        write_tokenizer_json(folder, self.vocabulary, merges=(), split_pattern=None)


Merges: TypeAlias = tuple[tuple[bytes, bytes], ...]

# English prose has fewer distinct pieces than this; an entry takes about 200 bytes.
_CACHE_ENTRIES = 1 << 16


@final_class
class BpeTokeniser(_OwnTokeniser):
    """A byte-level BPE tokeniser: ids 0 to 255 are the bytes, then one per merge with a new token, then the end token.

    One value may serve any number of threads.
    """

    def __init__(self, merges: Merges) -> None:
        pieces = _pieces_of(merges)
        super().__init__(Vocabulary(pieces), _digest(merges))
        self.merges = merges
        """The pairs that become one token, in the order in which they were learnt."""
        ids = {printable(piece): number for number, piece in enumerate(pieces)}
        self._cached = _Cache(BPE(vocab=ids, merges=[(printable(a), printable(b)) for a, b in merges]))

    def encode_piece(self, data: Bytes, *, final: bool) -> tuple[NDArray[np.int32], int]:
        """Encode the next piece of a stream; returns its tokens, and how many of its bytes they cover.

        The caller keeps `data[consumed:]`, fewer than TAIL_BYTES, and puts it in front of the next piece. With
        `final` every byte is consumed.

        Raises: TokenError if `data` is not bytes.
        """
        out, consumed = bytearray(), 0
        for part in cut_blocks(data, final=final):
            out += b"".join(map(self._cached.__getitem__, part.pieces))
            consumed = part.stop
        return np.frombuffer(out, dtype=np.int32), consumed

    def save(self, folder: Path) -> None:
        """Write `tokenizer.json` into the folder, which is made if needed."""
        write_tokenizer_json(folder, self.vocabulary, self.merges, split_pattern=TEXT_PATTERN)


class _Cache(dict[bytes, bytes]):
    """A cache from a piece to its ids as raw int32, so that a text is put together by one join; emptied when full."""

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


_READ_BYTES = 1 << 20
_REPEATS_AT_ONCE = 1 << 12


def train_bpe(paths: Sequence[Path], vocab_size: int) -> BpeTokeniser:
    """Learn a vocabulary from the bytes of these files; the same files always give the same ids.

    `vocab_size` counts the 256 bytes and the end token. Text with too little repetition gives a smaller one.

    Raises: InputError for a size below 258, an unreadable file, or text in which nothing repeats.
    """
    if vocab_size < 258:
        raise InputError(
            f"vocab_size is {vocab_size}; it has to hold 256 bytes, the end token and a merge: give 258 or more"
        )
    counts = _count_pieces(paths)
    alphabet = [printable(piece) for piece in BYTE_PIECES]
    trainer = BpeTrainer(
        vocab_size=vocab_size - 1,
        min_frequency=2,
        show_progress=False,
        initial_alphabet=alphabet,
        limit_alphabet=256,
    )
    learner = Tokenizer(BPE())
    learner.pre_tokenizer = WhitespaceSplit()
    learner.train_from_iterator(_repeated(counts), trainer)
    back = {character: value for value, character in enumerate(alphabet)}
    merges = tuple(
        (bytes(back[c] for c in first), bytes(back[c] for c in second))
        for first, second in json.loads(learner.to_str())["model"]["merges"]
    )
    if not merges:
        raise InputError(
            f"nothing repeats in the text of {len(paths)} file(s), so there is nothing to learn; give more"
        )
    return BpeTokeniser(merges)


def _count_pieces(paths: Sequence[Path]) -> Counter[bytes]:
    """Count how often each piece occurs; a piece never reaches over the end of a file."""
    counts: Counter[bytes] = Counter()
    for path in paths:
        tail = b""
        try:
            with Path(path).open("rb") as file:
                while block := file.read(_READ_BYTES):
                    tail += block
                    stop = 0
                    for part in cut_blocks(tail, final=False):
                        counts.update(part.pieces)
                        stop = part.stop
                    tail = tail[stop:]
        except OSError as error:
            raise InputError(f"training text {path} cannot be read: {error.strerror}") from None
        for part in cut_blocks(tail, final=True):
            counts.update(part.pieces)
    return counts


def _repeated(counts: Counter[bytes]) -> Iterator[str]:
    """Repeat each piece as often as it was counted, parted by blanks: the printable alphabet has none."""
    for piece, count in sorted(counts.items()):
        text = printable(piece)
        for done in range(0, count, _REPEATS_AT_ONCE):
            yield " ".join([text] * min(_REPEATS_AT_ONCE, count - done))
