"""The rank of passages for a query: counts of their words, Okapi BM25, vectors less their mean, and both together.

Okapi BM25 takes a few lines rather than a library: counts are taken in segments while rows still come, and rarity is
that in all documents of a request together, even if some of them were counted before.

Letters: N passages of all documents, D model width, V different words, W words of a query.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt

__all__ = ["WordCounts", "bm25", "directions", "fused", "hashes_of", "having", "places_of", "ranks", "words_of"]

WORDS = 0.5  # the weight in `fused` of a passage with all words of the query
# Robertson and Zaragoza 2009, Eq. 3.15, with the constants that most engines set.
K1, B = 1.2, 0.75
MOST_PLACES = 1000
# Han characters and kana stand without blanks between words.
_ALONE = "\u3041-\u3096\u309d-\u309f\u30a1-\u30fa\u30fc-\u30ff\u3400-\u4dbf\u4e00-\u9fff\U00020000-\U0003ffff"
_WORD = re.compile(rf"[{_ALONE}]|[^\W_{_ALONE}]+")
_UNCOMPOSED = re.compile(rf"[{_ALONE}][\u3099\u309a]?|(?:[^\W_{_ALONE}][\u0300-\u036f]{{0,30}})+")
# Normalising sorts the marks after a letter in time quadratic in their number: as in stream-safe text (UAX 15), 30 of
# them count. A mark is neither a letter nor a digit, and nothing but these composes with one to a letter or digit.
_TOO_MANY_MARKS = re.compile(r"([^\w\0-\x7f]{30})[^\w\0-\x7f]+")

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def words_of(text: str) -> list[str]:
    """The words of a text: runs of letters and digits, casefolded and in NFC; each Han character and kana is a word.

    Of the marks after a letter the first 30 count.
    """
    return [word.casefold() for word in _WORD.findall(unicodedata.normalize("NFC", _TOO_MANY_MARKS.sub(r"\1", text)))]


def places_of(text: str, words: frozenset[str]) -> list[tuple[int, int]]:
    """The places of these words in a text, in characters, stops exclusive; the first `MOST_PLACES` of them."""
    if _TOO_MANY_MARKS.search(text) is None and unicodedata.is_normalized("NFC", text):
        found = (match.span() for match in _WORD.finditer(text) if match[0].casefold() in words)
    else:
        found = (match.span() for match in _UNCOMPOSED.finditer(text) if not words.isdisjoint(words_of(match[0])))
    return list(islice(found, MOST_PLACES))


@dataclass(frozen=True)
class WordCounts:
    """The counts of words in each of some passages, the first of which is number `first`.

    Words are kept as their hashes, 24 bytes each at most whatever their length; two of 64 bits hardly ever agree. The
    passages with word `hashes[v]` are `rows[starts[v] : starts[v + 1]]`, in order, and `counts` has its count in each.
    Shapes: hashes [V] in rising order, starts [V + 1], rows and counts alike, lengths [passages] in words.
    """

    first: int
    hashes: Ints
    starts: Ints
    rows: npt.NDArray[np.int32]
    counts: npt.NDArray[np.int32]
    lengths: Ints

    @classmethod
    def of(cls, passages: Sequence[Iterable[str]], first: int = 0) -> "WordCounts":
        """Count the words of passages, each given as the parts of its text, one part in memory at a time."""
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

    def having(self, hashes_W: Ints) -> tuple[Ints, Ints]:
        """The bounds in `rows` and `counts` of the passages with each of these words, [W] each."""
        places_W = np.searchsorted(self.hashes, hashes_W)
        known_W = places_W < len(self.hashes)
        known_W[known_W] = self.hashes[places_W[known_W]] == hashes_W[known_W]
        return self.starts[places_W] * known_W, self.starts[places_W + known_W] * known_W

    def only(self, words: Collection[str]) -> "WordCounts":
        """Leave out the counts of other words; lengths stay."""
        hashes_V = np.unique(hashes_of(words))
        begins_V, ends_V = self.having(hashes_V)
        at = np.concatenate([np.arange(*edges) for edges in zip(begins_V, ends_V, strict=True)] or [begins_V])
        starts = np.append(0, np.cumsum(ends_V - begins_V))
        return WordCounts(self.first, hashes_V, starts, self.rows[at], self.counts[at], self.lengths)


def bm25(query: str, segments: Sequence[WordCounts], total: int) -> tuple[Floats, Floats]:
    """The score of each of `total` passages for a query, and the share of the query that the passage has, [N] each.

    A score is 0 where no word is shared. The share is the rarity of the query's words that the passage has, over that
    of all its words, 0 to 1. `first` of a segment counts over all of them.
    """
    scores_N, shares_N = np.zeros(total), np.zeros(total)
    lengths = sum((int(segment.lengths.sum()) for segment in segments), 0)
    mean = max(1.0, lengths / max(1, total))
    hashes_W, times_W = np.unique(hashes_of(words_of(query)), return_counts=True)
    number_W = having(hashes_W, segments)
    rarity_W = np.log1p((total - number_W + 0.5) / (number_W + 0.5))
    for segment in segments:
        begins_W, ends_W = segment.having(hashes_W)
        size_W = ends_W - begins_W
        word = np.repeat(np.arange(len(hashes_W)), size_W)  # of each count of these words, one after the other
        at = np.arange(len(word)) + np.repeat(ends_W - np.cumsum(size_W), size_W)
        rows, counts = segment.rows[at], segment.counts[at]
        length = 1 - B + B * segment.lengths[rows] / mean
        scores = (times_W * rarity_W)[word] * counts * (K1 + 1) / (counts + K1 * length)
        for sums_N, values in ((scores_N, scores), (shares_N, rarity_W[word])):
            sums_N[segment.first :][: len(segment.lengths)] += np.bincount(rows, values, len(segment.lengths))
    return scores_N, shares_N / max(float(rarity_W.sum()), 1e-12)


def hashes_of(words: Collection[str]) -> Ints:
    """Hash words as `WordCounts` has them, [W]."""
    return np.fromiter(map(hash, words), dtype=np.int64, count=len(words))


def having(hashes_W: Ints, segments: Iterable[WordCounts]) -> Ints:
    """The number of passages that have each of these words, [W]."""
    number_W = np.zeros(len(hashes_W), dtype=np.int64)
    for segment in segments:
        begins_W, ends_W = segment.having(hashes_W)
        number_W += ends_W - begins_W
    return number_W


def directions(vectors_ND: npt.NDArray[np.floating]) -> Floats:
    """The vectors scaled to length 1; a zero vector stays as it is."""
    return np.asarray(vectors_ND / np.maximum(np.linalg.norm(vectors_ND, axis=-1, keepdims=True), 1e-12), np.float64)


def ranks(scores_N: Floats, has_N: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """The place of each passage by falling score, from 1; 0 where `has_N` is false. Equal scores stay in order."""
    ranks_N = np.zeros(len(scores_N), dtype=np.int64)
    order = np.argsort(-np.where(has_N, scores_N, -np.inf), kind="stable")[: int(has_N.sum())]
    ranks_N[order] = np.arange(1, len(order) + 1)
    return ranks_N


def fused(cosines_N: Floats, shares_N: Floats) -> Floats:
    """Scores by meaning and by words: the cosine, and `WORDS` times the share of the query (`bm25`), [N].

    Ranks are not added: among passages of one line, the first that shares an "a" with the query would come before the
    best by meaning (docs/decisions/archive/0038-hybrid-search-adds-cosines-and-words.md).
    """
    return cosines_N + WORDS * shares_N
