"""The ends of a text's sentences, paragraphs and chapters, found while it comes, and the tokens that end with them.

A range has the tokens that end within it, so what lies across an edge belongs to the range behind it, and so does the
white space between two ranges. The last token of a range is marked by its complement, `~token`, which is negative; the
last range of a text ends with the text and needs no mark.
"""

import math
import re
from collections import deque
from collections.abc import Sequence
from typing import Any, final

import numpy as np
import numpy.typing as npt

from dist_attn.text.base import TokenArray

__all__ = ["CHAPTER_HEADING", "CutFinder", "marked_ends", "unmarked"]

# "CHAPTER IV", "Chapter 12. The Carpet-Bag", "  CHAPTER THE LAST"; not "Chapter of accidents".
CHAPTER_HEADING = rb"^[ \t]*(?:CHAPTER|Chapter)[ \t]+(?:\d+|[A-Z])"
CONTENTS_BYTES = 400  # a heading that follows another one within so many is a line of a table of contents

_VISIBLE_LATER = rb"\s{0,200}\S"
_EMPTY_LINE = rb"(?=\s)(?<=\S)(?=[ \t]{0,64}\r?\n[ \t]{0,64}\r?\n" + _VISIBLE_LATER + rb")"
_STOP = rb"(?P<stop>[.!?]|\xe2\x80\xa6)"  # the last one of several
_STOPS = (b".", b"!", b"?", b"\xe2\x80\xa6")
_CLOSERS = rb"(?:[\"')\]]|\xe2\x80[\x99\x9d]|\xc2\xbb){0,8}"
_WIDE = rb"(?:\xe3\x80\x82|\xef\xbc\x81|\xef\xbc\x9f){1,8}(?:\xe3\x80[\x8d\x8f]|\xef\xbc\x89){0,8}"
_PATTERNS = {
    "line": re.compile(rb"(?=\s)(?<=\S)(?=[ \t]{0,64}\r?\n" + _VISIBLE_LATER + rb")"),
    "paragraph": re.compile(_EMPTY_LINE),
    # "Done. Then", not "at 5 p.m. they": what goes on with a small letter was no end. Wide stops need no blank.
    "sentence": re.compile(_STOP + _CLOSERS + rb"(?=\s{1,200}[^\sa-z])|" + _WIDE + rb"|" + _EMPTY_LINE),
    "chapter": re.compile(CHAPTER_HEADING, re.MULTILINE),
}
_AHEAD = 512  # bytes behind a place that decide about it: more than any pattern spans
_BEHIND = 32  # bytes before it, likewise
PARAGRAPHS_BYTES = 1 << 16
"""The first bytes of a text that decide: without an empty line among them, each line is a paragraph."""

_LAST_WORD = re.compile(rb"([^\W\d_](?:\.?[^\W\d_]){0,14})\Z")
_ABBREVIATIONS = frozenset(
    b"mr mrs ms dr prof st jr sr messrs mme mlle rev hon gen col maj capt lt sgt gov sen rep pres supt insp esq "
    b"inc ltd co corp bros dept univ assn vs etc cf al ca approx viz ibid "
    b"e.g i.e a.m p.m u.s u.k d.c n.y ph.d b.c a.d z.b d.h bzw usw".split()
)
_BEFORE_NUMBERS = frozenset(
    b"no nos vol vols fig figs p pp art sec ch chap eq op nr jan feb mar apr jun jul aug sep sept oct nov dec".split()
)


@final
class CutFinder:
    """The edges of one text, of one kind, or as they were `given`: byte offsets in rising order.

    Memory: what was pushed and not decided yet, which is little more than 64 KiB, and tokens that wait for that. Time:
    linear in the bytes and tokens, whatever the pieces in which they come.
    """

    def __init__(self, kind: str, given: Sequence[int] = ()) -> None:
        """Find edges of `kind`: sentence, paragraph, chapter or boundaries; only the last takes `given`."""
        self._kind = kind
        self._pattern = _PATTERNS.get(kind)
        self._edges = deque(given)
        self._decided: float = math.inf if self._pattern is None else 0  # every edge up to here is known
        self._lines_unclear, self._searched = kind == "paragraph", 0  # for an empty line, in vain up to here
        self._new = bytearray()  # not looked at yet
        self._text, self._base = b"", 0  # the bytes that still matter, and where they begin
        self._last: int | None = None  # the last edge, or the last heading
        self._tokens: list[TokenArray] = []  # that may still be marked, in pieces, and their lengths
        self._lengths: list[npt.NDArray[np.integer[Any]]] = []
        self._bytes = 0  # where the first of them begins

    def push(self, data: bytes, *, final: bool = False) -> None:
        """Take the next bytes of the text; `final`: there are no more."""
        if self._pattern is None:
            return
        self._new += data
        if len(self._new) < _AHEAD and not final:
            return  # about as many are looked at again each time
        self._text += self._new
        self._new.clear()
        if self._lines_unclear and not self._see_layout(final):
            return
        start = max(0, int(self._decided) - self._base)
        safe = len(self._text) if final else max(start, len(self._text) - _AHEAD)
        for match in self._pattern.finditer(self._text, start):
            edge = match.start() if self._kind == "chapter" else match.end()
            if edge > safe:
                if len(self._text) - match.start() <= PARAGRAPHS_BYTES:
                    safe = min(safe, match.start())  # it is looked for again, whole, with what follows
                break
            self._take(edge, match)
        self._decided = math.inf if final else self._base + safe
        drop = max(0, safe - _BEHIND)
        self._text, self._base = self._text[drop:], self._base + drop

    def mark(
        self, tokens: TokenArray, byte_lengths: npt.NDArray[np.integer[Any]], *, final: bool = False
    ) -> tuple[TokenArray, npt.NDArray[np.int64]]:
        """Take tokens in; returns those, with their lengths, of which it is known whether a range ends with them.

        Every token but the last of a text is marked where a range ends with it; `final`: after the last push.
        """
        self._tokens.append(tokens)
        self._lengths.append(byte_lengths)
        if not final and self._decided <= self._bytes:
            return np.empty(0, dtype=np.int32), np.empty(0, dtype=np.int64)
        waiting = np.concatenate(self._tokens, dtype=np.int32)
        ends = np.cumsum(np.concatenate(self._lengths), dtype=np.int64)
        ends += self._bytes
        # A token is decided once every edge before the end of the next one is known.
        ready = len(ends) if final else max(0, int(np.searchsorted(ends, self._decided + 1, side="right")) - 1)
        known, before = [], math.inf if final else ends[ready] if ready else 0
        while self._edges and self._edges[0] < before:
            known.append(self._edges.popleft())
        places = np.searchsorted(ends, known, side="right") - 1
        places = places[(places >= 0) & (places < len(ends) - 1)]
        waiting[places] = ~waiting[places]
        lengths = np.diff(ends, prepend=self._bytes)
        self._tokens, self._lengths = [waiting[ready:]], [lengths[ready:]]
        self._bytes = int(ends[ready - 1]) if ready else self._bytes
        return waiting[:ready], lengths[:ready]

    def _see_layout(self, final: bool) -> bool:
        """Return whether it is known by now how paragraphs of this text are told apart."""
        found = _PATTERNS["paragraph"].search(self._text, self._searched)
        if found is None and not final and len(self._text) < PARAGRAPHS_BYTES + _AHEAD:
            self._searched = max(0, len(self._text) - _AHEAD)
            return False
        if found is None or found.start() > PARAGRAPHS_BYTES:
            self._pattern = _PATTERNS["line"]
        self._lines_unclear = False
        return True

    def _take(self, edge: int, match: re.Match[bytes]) -> None:
        at = self._base + edge
        if self._kind == "chapter":
            close = self._last is not None and at - self._last < CONTENTS_BYTES
            self._last = at
            if close:
                return
        elif at == self._last or (self._kind == "sentence" and self._abbreviates(match)):
            return
        self._last = at
        if at:
            self._edges.append(at)

    def _abbreviates(self, match: re.Match[bytes]) -> bool:
        """Return whether a full stop belongs to the word before it."""
        start, stop = match.start(), match.end("stop")
        if match["stop"] != b"." or self._text.endswith(_STOPS, 0, start):
            return False
        if match.end() == stop and self._paragraph_ends(stop):
            return False
        word = _LAST_WORD.search(self._text[max(0, start - _BEHIND) : start])
        if word is None:
            return False
        known = word[1].lower()
        if known in _BEFORE_NUMBERS:
            return self._text[match.end() : match.end() + _AHEAD].lstrip()[:1].isdigit()
        initial = len(word[1]) == 1 and word[1].isupper() and word[1] != b"I"
        return initial or known in _ABBREVIATIONS

    def _paragraph_ends(self, at: int) -> bool:
        return _PATTERNS["paragraph"].match(self._text, at) is not None


def marked_ends(tokens: npt.NDArray[np.integer[Any]], start: int = 0) -> npt.NDArray[np.int64]:
    """Find the positions at which ranges end, by their marks; the first token is at `start`."""
    return np.flatnonzero(tokens < 0) + (start + 1)


def unmarked(tokens: TokenArray) -> TokenArray:
    """Remove the marks of tokens."""
    return np.where(tokens < 0, ~tokens, tokens)
