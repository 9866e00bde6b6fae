"""Passages of the novels with their authors, cut from parts of the books that are trained on or held out, not both."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from dist_attn.errors import ConfigError
from dist_attn.text.bpe import ByteTokeniser
from dist_attn_papers.tables.made_once import make_once
from dist_attn_papers.tables.novels import FOLDER, find_novel

__all__ = [
    "AUTHORS",
    "Passage",
    "PassageSpec",
    "author_files",
    "draw_pairs",
    "pair_files",
    "plain",
    "read_passages",
    "tokeniser_folder",
]

AUTHORS: Mapping[str, tuple[str, ...]] = {
    "austen": ("emma", "pride_and_prejudice"),
    "bronte": ("jane_eyre",),
    "cervantes": ("don_quixote",),
    "dickens": ("bleak_house", "david_copperfield", "great_expectations", "tale_of_two_cities"),
    "dostoevsky": ("brothers_karamazov", "crime_and_punishment"),
    "eliot": ("middlemarch",),
    "hugo": ("les_miserables",),
    "melville": ("moby_dick",),
    "thackeray": ("vanity_fair",),
    "tolstoy": ("anna_karenina", "war_and_peace"),
}
# A book is cut into so many parts of one length; every fifth is held out.
PARTS, HELD_OUT_EVERY = 40, 5

_MARKS = str.maketrans({'"': "'", "`": "'", "_": "", "*": "", "|": "", "[": "(", "]": ")", "{": "(", "}": ")"})
_DASHES, _SPACE, _QUOTES = re.compile(r"-{2,}"), re.compile(r"\s+"), re.compile(r"'{2,}")


@dataclass(frozen=True)
class PassageSpec:
    """How many passages of each author there are, and of how many bytes each one is; the seed draws which."""

    train: int
    held_out: int
    min_length: int = 1024
    max_length: int = 4096
    seed: int = 0


@dataclass(frozen=True)
class Passage:
    """Bytes [start, start + len(text)) of a book as `plain` gives it."""

    author: str
    book: str
    part: int
    start: int
    text: str

    @property
    def is_held_out(self) -> bool:
        """Whether no model is trained on it."""
        return self.part % HELD_OUT_EVERY == HELD_OUT_EVERY - 1


def plain(text: str) -> str:
    """The text without the edition's ways with lines, quotation marks, dashes, brackets and italics.

    What is left of an author is in letters, words and sentences, not in how a transcriber typed them.
    """
    return _SPACE.sub(" ", _DASHES.sub("-", _QUOTES.sub("'", text.translate(_MARKS)))).strip()


def read_passages(spec: PassageSpec, folder: Path = FOLDER) -> tuple[list[Passage], list[Passage]]:
    """Passages to train on and held-out ones, equally many of every author, in the order of the authors.

    Raises: ConfigError for a book that is missing, and for authors who have not written enough.
    """
    draw = np.random.default_rng(spec.seed)
    train: list[Passage] = []
    held_out: list[Passage] = []
    for author, books in AUTHORS.items():
        every = [passage for book in books for passage in _cut(author, book, folder, spec, draw)]
        for wanted, kept, is_held_out in ((spec.train, train, False), (spec.held_out, held_out, True)):
            found = [passage for passage in every if passage.is_held_out is is_held_out]
            if len(found) < wanted:
                raise ConfigError(
                    f"{author} has {len(found)} passages of {spec.min_length} to {spec.max_length} bytes that are "
                    f"{'held out' if is_held_out else 'trained on'}; needed are {wanted}: give a smaller scale"
                )
            kept += [found[number] for number in draw.permutation(len(found))[:wanted]]
    return train, held_out


def author_files(made: Path, spec: PassageSpec) -> tuple[Path, Path]:
    """Labelled texts in `made`, written once: {"text", "label"} to train on, and held out."""
    name = f"authors-{spec.train}-{spec.held_out}-{spec.min_length}-{spec.max_length}-{spec.seed}"
    paths = made / f"{name}-train.jsonl", made / f"{name}-held-out.jsonl"
    if not all(path.exists() for path in paths):
        for path, passages in zip(paths, read_passages(spec), strict=True):
            records = [{"text": passage.text, "label": passage.author} for passage in passages]
            make_once(path, partial(_write_lines, records))
    return paths


def draw_pairs(passages: Sequence[Passage], count: int, seed: int) -> list[tuple[Passage, Passage, bool]]:
    """So many pairs of two passages, every other one by one author; all authors are equally likely in both kinds."""
    draw = np.random.default_rng(seed)
    by_author: dict[str, list[Passage]] = {}
    for passage in passages:
        by_author.setdefault(passage.author, []).append(passage)
    authors = list(by_author)
    pairs = []
    for number in range(count):
        same = number % 2 == 0
        if same:
            own = by_author[authors[int(draw.integers(len(authors)))]]
            first, second = (own[int(index)] for index in draw.choice(len(own), 2, replace=False))
        else:
            two = (by_author[authors[int(index)]] for index in draw.choice(len(authors), 2, replace=False))
            first, second = (own[int(draw.integers(len(own)))] for own in two)
        pairs.append((first, second, same))
    return pairs


def pair_files(made: Path, spec: PassageSpec, train: int, held_out: int) -> tuple[Path, Path]:
    """Pairs of passages of one split in `made`, written once: {"text", "other", "label"} to train on, and held out."""
    name = f"pairs-{train}-{held_out}-of-{spec.train}-{spec.held_out}-{spec.min_length}-{spec.max_length}-{spec.seed}"
    paths = made / f"{name}-train.jsonl", made / f"{name}-held-out.jsonl"
    if not all(path.exists() for path in paths):
        for path, passages, count in zip(paths, read_passages(spec), (train, held_out), strict=True):
            pairs = draw_pairs(passages, count, spec.seed)
            records = [{"text": a.text, "other": b.text, "label": "same" if same else "other"} for a, b, same in pairs]
            make_once(path, partial(_write_lines, records))
    return paths


def tokeniser_folder(made: Path) -> Path:
    """The folder of the byte tokeniser below `made`."""
    return make_once(made / "bytes", ByteTokeniser().save)


def _write_lines(records: Sequence[Mapping[str, str]], path: Path) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def _cut(author: str, book: str, folder: Path, spec: PassageSpec, draw: np.random.Generator) -> Iterator[Passage]:
    """The passages of a book one after the other; none goes over the end of a part."""
    path = find_novel(f"{book}.txt", folder)
    try:
        text = plain(path.read_text(encoding="ascii"))
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not plain ASCII, as the passages' bytes need it") from None
    edges = [len(text) * part // PARTS for part in range(PARTS + 1)]
    for part in range(PARTS):
        start = edges[part]
        while True:
            length = int(draw.integers(spec.min_length, spec.max_length + 1))
            if start + length > edges[part + 1]:
                break
            yield Passage(author, book, part, start, text[start : start + length])
            start += length
