"""Learning a BPE vocabulary from files."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.trainers import BpeTrainer

from dist_attn.errors import InputError
from dist_attn.text.bpe import BpeTokeniser
from dist_attn.text.bytes import BYTE_PIECES
from dist_attn.text.hugging_face import printable
from dist_attn.text.pieces import cut_blocks

__all__ = ["train_bpe"]

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
    """How often each piece occurs; a piece never reaches over the end of a file."""
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
    """Each piece as often as it was counted, parted by blanks: the printable alphabet has none."""
    for piece, count in sorted(counts.items()):
        text = printable(piece)
        for done in range(0, count, _REPEATS_AT_ONCE):
            yield " ".join([text] * min(_REPEATS_AT_ONCE, count - done))
