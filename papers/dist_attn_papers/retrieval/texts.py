"""Texts for training and judging encoders, apart by document: every third one is kept for judging."""

import re
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

from dist_attn_papers.retrieval.packages import unpacked
from dist_attn_papers.studies.chapter_retrieval import BOOKS as HELD_OUT_BOOKS

__all__ = ["brown_documents", "glosses", "is_held_out", "novels", "speeches", "verses"]

_PARTS_OF_SPEECH = ("noun", "verb", "adj", "adv")
_KEPT_EVERY = 3


def is_held_out(number: int) -> bool:
    """Whether the document of this number, in the order of names, is kept for judging: every third one."""
    return number % _KEPT_EVERY == 0


def novels(folder: Path, *, held_out: bool) -> Iterator[tuple[str, str]]:
    """Names and texts of the books."""
    for path in sorted(folder.glob("*.txt")):
        if (path.name in HELD_OUT_BOOKS) == held_out:
            yield path.stem, path.read_text("utf-8", "replace")


def speeches(*, held_out: bool) -> Iterator[tuple[str, str]]:
    """Names, which begin with the year, and texts of the State of the Union addresses."""
    for number, path in enumerate(sorted((unpacked("speeches") / "package" / "data").glob("*.txt"))):
        if is_held_out(number) == held_out:
            yield path.stem, path.read_text("utf-8", "replace")


def brown_documents(*, held_out: bool) -> Iterator[tuple[str, str]]:
    """Genres and texts of the Brown corpus, its tags taken off."""
    folder = unpacked("brown") / "package"
    lines = (folder / "cats.txt").read_text("utf-8").splitlines()
    for number, line in enumerate(sorted(lines)):
        name, genre = line.split()
        if is_held_out(number) == held_out:
            tagged = (folder / name).read_text("utf-8", "replace").split()
            yield genre, _untagged(word.rpartition("/")[0] for word in tagged)


def _untagged(words: Iterator[str]) -> str:
    text = " ".join(words).replace("``", '"').replace("''", '"')
    return re.sub(r" ([.,;:?!])(?: \1)?", r"\1", text)


def glosses(*, held_out: bool) -> Iterator[tuple[tuple[str, ...], str]]:
    """The words of each synset of WordNet, and its definition without examples."""
    number, folder = 0, unpacked("wordnet") / "usr/share/wordnet"
    for part in _PARTS_OF_SPEECH:
        for line in (folder / f"data.{part}").read_text("utf-8").splitlines():
            if line.startswith(" "):
                continue  # the licence
            facts, _, gloss = line.partition(" | ")
            fields = facts.split()
            words = fields[4 : 4 + 2 * int(fields[3], 16) : 2]
            number += 1
            if is_held_out(number) == held_out:
                names = tuple(re.sub(r"\(\w+\)$", "", word).replace("_", " ") for word in words)
                yield names, gloss.split('; "')[0].strip()


# The King James and the World English Bible number their New Testaments alike up to the third letter of John.
_ALIKE = 7776


def verses() -> Iterator[tuple[str, str]]:
    """The same verse of the King James and of the World English Bible; none of them is trained on."""
    for old, new in zip(_testament("kjv"), _testament("web"), strict=True):
        if len(old) > 20 and len(new) > 20:
            yield old, new


def _testament(name: str) -> list[str]:
    """The entries of a SWORD module: verses, and in their places headings of books and chapters, often empty."""
    (blocks,) = unpacked(name).glob("usr/share/sword/modules/texts/ztext/*/nt.bzs")
    data, texts = blocks.with_suffix(".bzz").read_bytes(), []
    for offset, size, _ in struct.iter_unpack("<III", blocks.read_bytes()):
        texts.append(zlib.decompress(data[offset : offset + size]) if size else b"")
    places = struct.iter_unpack("<IIH", blocks.with_suffix(".bzv").read_bytes()[: 10 * _ALIKE])
    return [_plain(texts[block][start : start + size].decode("utf-8", "replace")) for block, start, size in places]


def _plain(osis: str) -> str:
    without = re.sub(r"<(note|title)\b.*?</\1>", " ", osis, flags=re.DOTALL)
    return " ".join(re.sub(r"<[^>]*>", " " if "<w " not in osis else "", without).split())
