"""Edges of sentences, paragraphs and chapters: where they lie, and that pieces of a stream change none."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_attn.text import cuts
from dist_attn.text.cuts import PARAGRAPHS_BYTES, CutFinder, marked_ends, unmarked

PROSE = (
    "Mr. Holmes met Dr. J. Watson at 5 p.m. in Baker St. near no. 7. “Come at once!” he said. Then silence...\n\n"
    "THE NEXT DAY\n\nWas it I. Or you? See e.g. the U.S. papers. It cost 3.50 pounds.\n"
    "No. He left (at last.) We stayed.\n"
)


PARTS = [*["A", "b", ".", "!", "”", "。", "é", "Dr", "end"], "CHAPTER I", " ", "\n", "\n\n", " " * 90, "x" * 300]


def ranges(kind, text, sizes=(), given=()):
    """The ranges of a text that comes in pieces of these sizes, a token for each of its bytes."""
    data, finder, at, tokens = text.encode(), CutFinder(kind, given), 0, []
    for size in [*sizes, len(data)]:
        piece = np.frombuffer(data[at : at + size], np.uint8).astype(np.int32)
        finder.push(data[at : at + size])
        tokens.append(finder.mark(piece, np.ones(len(piece), np.int64))[0])
        at += len(piece)
    finder.push(b"", final=True)
    tokens.append(finder.mark(np.empty(0, np.int32), np.empty(0, np.int64), final=True)[0])
    marked = np.concatenate(tokens)
    assert bytes(unmarked(marked).tolist()) == data
    edges = [0, *marked_ends(marked).tolist(), len(data)]
    return [data[a:b].decode() for a, b in pairwise(edges)]


@pytest.mark.parametrize("stop", ['."', ".)", "。』"])
def test_a_stop_may_lie_where_nothing_is_decided_yet(stop):
    """Wherever a text is cut, a stop of several characters ends its sentence."""
    text = "x" * 600 + f" He left{stop} " + "Then she. " * 80
    whole = ranges("sentence", text)
    length = len(text.encode())
    assert all(ranges("sentence", text, [size]) == whole for size in range(length - 60, length - 1))
    assert all(ranges("sentence", text, [size]) == whole for size in range(1090, 1150))


def test_sentences():
    """Full stops of abbreviations, initials and numbers end none; an empty line ends one without a stop."""
    assert [part.strip() for part in ranges("sentence", PROSE)] == [
        "Mr. Holmes met Dr. J. Watson at 5 p.m. in Baker St. near no. 7.",
        "“Come at once!” he said.",
        "Then silence...",
        "THE NEXT DAY",
        "Was it I.",
        "Or you?",
        "See e.g. the U.S. papers.",
        "It cost 3.50 pounds.",
        "No.",
        "He left (at last.)",
        "We stayed.",
    ]
    assert ranges("sentence", "今日は。明日は！") == ["今日は。", "明日は！"]


def test_paragraphs_by_empty_lines_or_by_lines():
    """A text with an empty line has its paragraphs between these, and one without has a paragraph on each line."""
    assert ranges("paragraph", "a\nb\n\nc\n \n\nd\n\n") == ["a\nb", "\n\nc", "\n \n\nd\n\n"]
    assert ranges("paragraph", "a\nb\nc\n") == ["a", "\nb", "\nc\n"]


def test_the_layout_is_that_of_the_beginning():
    """An empty line behind the first 64 KiB comes too late to be looked for, in however many pieces the text comes."""
    lines = "a line\n" * (PARAGRAPHS_BYTES // 7)
    for behind, paragraphs in ((0, True), (700, False)):
        text = lines[:-1] + "x" * behind + "\n\nb\nc\n"
        whole = ranges("paragraph", text)
        assert (len(whole) == 2) == paragraphs
        assert ranges("paragraph", text, [1000] * 60 + [1] * 7000) == whole


@pytest.mark.parametrize("kind", ["sentence", "paragraph", "chapter"])
def test_no_byte_is_looked_at_often(kind, monkeypatch):
    """A text in pieces of a byte is gone through a few times in all, and not anew with every piece."""
    looked_at = 0

    class Counted:
        """A pattern that counts the bytes before which it is to stop."""

        def __init__(self, pattern):
            self._pattern = pattern

        def __getattr__(self, name):
            def find(text, start=0):
                nonlocal looked_at
                looked_at += len(text) - start
                return getattr(self._pattern, name)(text, start)

            return find

    monkeypatch.setattr(cuts, "_PATTERNS", {name: Counted(pattern) for name, pattern in cuts._PATTERNS.items()})
    data = b"x   \n" * 15_000
    finder = CutFinder(kind)
    for place in range(len(data)):
        finder.push(data[place : place + 1])
    finder.push(b"", final=True)
    assert len(data) <= looked_at < 5 * len(data)


def test_chapters_begin_with_their_headings():
    """Lines of a table of contents begin none, and neither do words in the middle of a line."""
    contents = "Title\n\nCHAPTER I. One\nCHAPTER II. Two\n\n" + "Preface. " * 60 + "\n"
    first, second = "CHAPTER I. One\n" + "a Chapter of accidents. " * 30 + "\n", "  Chapter 2\n" + "b " * 300
    parts = ranges("chapter", contents + first + second)
    assert parts == ["Title\n\n", contents[len("Title\n\n") :], first, second]


def test_given_edges_are_kept_and_what_lies_across_one_belongs_behind_it():
    """Offsets in bytes; a token that an edge divides is in the range in which it ends."""
    assert ranges("boundaries", "abcdef", given=(2, 5)) == ["ab", "cde", "f"]
    finder = CutFinder("boundaries", (1, 4, 5, 9))
    tokens, lengths = np.arange(4, dtype=np.int32), np.array([3, 2, 3, 1])  # ends 3, 5, 8, 9
    marked, _ = finder.mark(tokens, lengths, final=True)
    assert marked_ends(marked).tolist() == [1, 2]


@pytest.mark.parametrize("kind", ["sentence", "paragraph", "chapter"])
@given(
    text=st.lists(st.sampled_from(PARTS)).map("".join),
    sizes=st.lists(st.integers(0, 700), max_size=8),
)
def test_edges_do_not_depend_on_the_pieces(kind, text, sizes):
    """However the bytes come, the ranges are those of the whole text, and every one has something to see in it."""
    whole = ranges(kind, text)
    assert ranges(kind, text, sizes) == whole
    assert all(part.strip() for part in whole) or len(whole) == 1 or not whole[0].strip()
