"""Words of passages, counted, and Okapi BM25 over these counts.

A few lines rather than a library: counts are taken in segments while rows still come, and rarity is of all documents of
a request together, whichever of them were counted before.

Letters: N passages of all documents, V different words.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt

__all__ = ["WordCounts", "bm25", "places_of", "words_of"]

# Robertson and Zaragoza 2009, Eq. 3.15, with the constants that most engines set.
K1, B = 1.2, 0.75
MOST_PLACES = 1000
_WORD = re.compile(r"[^\W_]+")

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def words_of(text: str) -> list[str]:
    """Runs of letters and digits, in any case."""
    return [word.casefold() for word in _WORD.findall(text)]


def places_of(text: str, words: frozenset[str]) -> list[tuple[int, int]]:
    """Where these words stand in a text, in characters, stops exclusive; the first `MOST_PLACES` of them."""
    found = (match.span() for match in _WORD.finditer(text) if match[0].casefold() in words)
    return list(islice(found, MOST_PLACES))


@dataclass(frozen=True)
class WordCounts:
    """How often which word stands in each of some passages, the first of which is number `first`.

    Words are kept as their hashes, 24 bytes each at most whatever their length; two of 64 bits hardly ever agree. The
    passages with word `hashes[v]` are `rows[starts[v] : starts[v + 1]]`, in order, and `counts` says how often. Shapes:
    hashes [V] in rising order, starts [V + 1], rows and counts alike, lengths [passages] in words.
    """

    first: int
    hashes: Ints
    starts: Ints
    rows: npt.NDArray[np.int32]
    counts: npt.NDArray[np.int32]
    lengths: Ints

    @classmethod
    def of(cls, passages: Sequence[Iterable[str]], first: int = 0) -> "WordCounts":
        """The words of these passages, each given as the parts of its text, whose words are held one part at a time."""
        found = [np.empty((3, 0), dtype=np.int64)]  # word, passage, count
        for passage, parts in enumerate(passages):
            for part in parts:
                own = Counter(map(hash, words_of(part)))
                found.append(np.array([[*own], [passage] * len(own), [*own.values()]], dtype=np.int64))
        table = np.concatenate(found, axis=1)
        found.clear()
        word, row, count = table = table[:, np.lexsort((table[1], table[0]))]
        begins = np.flatnonzero((np.diff(word, prepend=0) != 0) | (np.diff(row, prepend=-1) != 0))
        lengths = np.bincount(row, count, minlength=len(passages)).astype(np.int64)
        row, count = row[begins].astype(np.int32), np.add.reduceat(count, begins).astype(np.int32)
        hashes, starts = np.unique(word[begins], return_index=True)
        return cls(first, hashes, np.append(starts, len(row)), row, count, lengths)

    def having(self, word: str) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """The passages that have a word, counted from the first of these, and how often."""
        place = int(np.searchsorted(self.hashes, hash(word)))
        known = place < len(self.hashes) and self.hashes[place] == hash(word)
        some = slice(self.starts[place], self.starts[place + 1]) if known else slice(0)
        return self.rows[some], self.counts[some]


def bm25(query: str, segments: Sequence[WordCounts], total: int) -> Floats:
    """The score of each of `total` passages for a query, [N]; 0 where no word is shared.

    `first` of a segment counts over all of them.
    """
    scores_N = np.zeros(total)
    lengths = sum((int(segment.lengths.sum()) for segment in segments), 0)
    mean = max(1.0, lengths / max(1, total))
    for word, times in Counter(words_of(query)).items():
        found = [segment.having(word) for segment in segments]
        number = sum((len(rows) for rows, _ in found), 0)
        rarity = np.log1p((total - number + 0.5) / (number + 0.5))
        for segment, (rows, counts) in zip(segments, found, strict=True):
            length = 1 - B + B * segment.lengths[rows] / mean
            scores_N[segment.first + rows] += times * rarity * counts * (K1 + 1) / (counts + K1 * length)
    return scores_N
