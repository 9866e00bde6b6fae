"""Chapters by their headings: the text between two of them, without the headings, tables of contents and strays."""

import numpy as np
import pytest

from dist_attn.text import ByteTokeniser
from dist_attn.training import chapters
from dist_attn.training.chapters import Chapter, find_chapters
from tests.support.tokenisers import PROSE, small_bpe

BOOK = b"""A book
CHAPTER I
CHAPTER II
 Chapter 1. Of things
one one one one
Chapter of accidents, they said
CHAPTER THE LAST
two two two two"""


def _texts(data: bytes, shortest: int) -> list[bytes]:
    tokens = ByteTokeniser().encode(data)
    return [data[c.start : c.stop] for c in find_chapters(data, tokens, ByteTokeniser(), shortest)]


def test_chapters_lie_between_headings():
    """Lines of contents are too short to be chapters, a sentence that begins with the word is no heading."""
    assert _texts(BOOK, 12) == [b"one one one one\nChapter of accidents, they said\n", b"two two two two"]
    assert _texts(BOOK, 16) == [b"one one one one\nChapter of accidents, they said\n"]
    assert _texts(b"no headings at all", 1) == []
    assert _texts(b"CHAPTER I", 1) == []


def test_a_book_without_headings_of_its_own_is_no_chapter(monkeypatch):
    """Behind the last line of contents everything is one piece, too long for a chapter."""
    monkeypatch.setattr(chapters, "LONGEST_CHAPTER", 20)
    assert _texts(BOOK, 12) == [b"two two two two"]


@pytest.mark.parametrize("shortest", [1, 40])
def test_tokens_that_straddle_a_heading_belong_to_nobody(shortest):
    """With tokens of several bytes a chapter holds whole tokens of its own text, and misses less than one an end."""
    tokeniser = small_bpe()
    data = b"".join(b"CHAPTER %d\n" % n + PROSE.encode() for n in range(3))
    tokens = tokeniser.encode(data)
    found = find_chapters(data, tokens, tokeniser, shortest)
    assert len(found) == 3
    longest = int(tokeniser.byte_lengths(tokens).max())
    for chapter in found:
        assert isinstance(chapter, Chapter)
        text = tokeniser.decode(np.asarray(tokens[chapter.start : chapter.stop]))
        assert text in PROSE.encode()
        assert len(text) > len(PROSE.encode()) - 2 * longest - 1
