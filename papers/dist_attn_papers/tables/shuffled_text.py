"""The books as one text of shuffled parts, a small vocabulary learnt from it, and a book that no training sees."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dist_attn.errors import ConfigError
from dist_attn.text import Tokeniser, load_tokeniser, train_bpe
from dist_attn_papers.tables.made_once import make_once
from dist_attn_papers.tables.novels import FOLDER, NOVELS, TEST, find_novel

__all__ = ["BOOKS", "BookText", "cut_parts", "prepare_books"]

BOOKS = tuple(name for name in NOVELS if name != TEST)
PART_BYTES = 1 << 17
SHUFFLE = 6


@dataclass(frozen=True)
class BookText:
    """Where the training text and its tokeniser lie; both are made once from the books."""

    train: Path
    tokeniser: Path

    def held_out(self, num_tokens: int) -> NDArray[np.int32]:
        """The first tokens of the book that is in no training text.

        Raises: ConfigError where it is missing or has fewer.
        """
        tokeniser: Tokeniser = load_tokeniser(self.tokeniser)
        tokens = tokeniser.encode(find_novel(TEST).read_bytes()[: 8 * num_tokens])[:num_tokens]
        if len(tokens) < num_tokens:
            raise ConfigError(f"{FOLDER / TEST} has {len(tokens)} tokens; {num_tokens} are to be scored")
        return tokens


def prepare_books(folder: Path, parts: int, vocab_size: int) -> BookText:
    """The first `parts` parts of all books but one, shuffled alike everywhere; made below `folder` if not there yet.

    A run whose rows begin at a few places of the text then meets as many books as one with rows in a thousand places.

    Raises: ConfigError naming a book that is missing.
    """
    made = folder / f"books-{parts}-{vocab_size}"
    text = BookText(made / "train.txt", made / "tokeniser")

    def make(beside: Path) -> None:
        shuffled = [part for name in BOOKS for part in cut_parts(find_novel(name).read_bytes())]
        random.Random(SHUFFLE).shuffle(shuffled)
        beside.mkdir()
        (beside / text.train.name).write_bytes(b"\n".join(shuffled[:parts]))
        train_bpe([beside / text.train.name], vocab_size).save(beside / text.tokeniser.name)

    make_once(made, make)
    return text


def cut_parts(book: bytes) -> Iterator[bytes]:
    """Stretches of about `PART_BYTES`, each to the end of its line; joined they are the book."""
    start = 0
    while start < len(book):
        line_end = book.find(b"\n", start + PART_BYTES)
        stop = len(book) if line_end < 0 else line_end + 1
        yield book[start:stop]
        start = stop
