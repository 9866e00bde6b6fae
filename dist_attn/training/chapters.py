"""Chapters of a plain text, found by their headings: what belongs together for contrastive training and retrieval."""

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dist_attn.text import Tokeniser

__all__ = ["LONGEST_CHAPTER", "Chapter", "find_chapters"]

# "CHAPTER IV", "Chapter 12. The Carpet-Bag", "  CHAPTER THE LAST"; not "Chapter of accidents".
_HEADING = re.compile(rb"^[ \t]*(?:CHAPTER|Chapter)[ \t]+(?:\d+|[A-Z])[^\n]*(?:\n|\Z)", re.MULTILINE)

LONGEST_CHAPTER = 32_768
"""Tokens. What is longer is no chapter but a book whose headings look otherwise."""


@dataclass(frozen=True)
class Chapter:
    """The tokens `start` to `stop` (exclusive) of a text."""

    start: int
    stop: int


def find_chapters(data: bytes, tokens: NDArray[np.int32], tokeniser: Tokeniser, shortest: int) -> tuple[Chapter, ...]:
    """The chapters of `data`, whose tokens are `tokens`, from behind one heading to before the next.

    Headings are lines that begin with "Chapter" or "CHAPTER" and a number or a capital; they belong to no chapter, nor
    does what comes before the first. Chapters of fewer than `shortest` tokens are left out, and with them the lines
    of a table of contents; so are those of more than `LONGEST_CHAPTER`.
    """
    headings = list(_HEADING.finditer(data))
    # The token at which each byte position is reached: one that straddles an edge belongs to neither side.
    ends_T = np.cumsum(tokeniser.byte_lengths(tokens))
    found = []
    stops = [*(heading.start() for heading in headings[1:]), len(data)]
    for heading, stop_byte in zip(headings, stops, strict=False):
        starts_T = np.searchsorted(ends_T, heading.end(), side="left") + 1
        stop = int(np.searchsorted(ends_T, stop_byte, side="right"))
        start = min(int(starts_T), stop)
        if shortest <= stop - start <= LONGEST_CHAPTER:
            found.append(Chapter(start, stop))
    return tuple(found)
