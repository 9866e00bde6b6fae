"""Documents in a search: rows with their texts, the counts of their words, vectors less their mean, and ranks.

Okapi BM25 takes a few lines rather than a library: counts are taken in segments while rows still come, and rarity is
that in all documents of a request together, even if some of them were counted before.

Letters: N passages of all documents, D model width, V different words, W words of a query.
"""

import asyncio
import dataclasses
import re
import unicodedata
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise

import numpy as np
import numpy.typing as npt

from dist_attn_service.encodings.encoding_run import RowBlock

__all__ = ["Passages", "Pool", "WordCounts", "bm25", "directions", "fused", "places_of", "ranks", "words_of"]

ROWS_AT_ONCE = 2048
# Bytes whose words are counted together: strings take some twenty times as much, and nothing else runs while words are
# found in them.
TEXT_AT_ONCE = 1 << 18
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


def bm25(query: str, segments: Sequence[WordCounts], total: int) -> tuple[Floats, Floats]:
    """The score of each of `total` passages for a query, and the share of the query that the passage has, [N] each.

    A score is 0 where no word is shared. The share is the rarity of the query's words that the passage has, over that
    of all its words, 0 to 1. `first` of a segment counts over all of them.
    """
    scores_N, shares_N = np.zeros(total), np.zeros(total)
    lengths = sum((int(segment.lengths.sum()) for segment in segments), 0)
    mean = max(1.0, lengths / max(1, total))
    hashes_W, times_W = np.unique(_hashes(words_of(query)), return_counts=True)
    number_W = _having(hashes_W, segments)
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


def _hashes(words: Collection[str]) -> Ints:
    return np.fromiter(map(hash, words), dtype=np.int64, count=len(words))


def _having(hashes_W: Ints, segments: Iterable[WordCounts]) -> Ints:
    """The number of passages that have each of these words, [W]."""
    number_W = np.zeros(len(hashes_W), dtype=np.int64)
    for segment in segments:
        begins_W, ends_W = segment.having(hashes_W)
        number_W += ends_W - begins_W
    return number_W


@dataclass(eq=False)
class Passages:
    """The first `rows` rows of a document. Calls block: they belong beside the event loop, and `grow` under `lock`.

    `read` gives rows [first, first + count), `read_text` the bytes [start, stop) of the document, of `size` bytes.
    """

    read: Callable[[int, int], RowBlock]
    read_text: Callable[[int, int], bytes]
    size: int
    rows: int = 0
    words: tuple[WordCounts, ...] = ()
    total_D: npt.NDArray[np.float64] | float = 0.0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def grow(self, upto: int) -> None:
        """Add some more of the rows before `upto`: as many as have `TEXT_AT_ONCE` bytes together, one at least."""
        block = self.read(self.rows, min(ROWS_AT_ONCE, upto - self.rows))
        begin, ends_N = int(block.ranges_N4[0, 2]), block.ranges_N4[:, 3]
        block = block.first(max(1, int(np.searchsorted(ends_N, begin + TEXT_AT_ONCE, side="right"))))
        texts = [self.parts(begin, int(ends_N[0]))] if len(block) == 1 else [[text] for text in self.texts(block)]
        counted = WordCounts.of(texts, self.rows)
        # The tuple is replaced whole: other searches may be reading it in other threads.
        self.words = (*self.words, counted)
        self.total_D = self.total_D + block.vectors_ND.sum(0, dtype=np.float64)
        self.rows += len(block)

    def text(self, start: int, stop: int) -> str:
        """The text of these bytes; half a character at an edge becomes U+FFFD."""
        return self.read_text(start, stop).decode("utf-8", "replace")

    def texts(self, block: RowBlock) -> list[str]:
        """The text of each row."""
        begin, stop = int(block.ranges_N4[0, 2]), int(block.ranges_N4[-1, 3])
        data = self.read_text(begin, stop)
        return [data[a - begin : b - begin].decode("utf-8", "replace") for a, b in block.ranges_N4[:, 2:].tolist()]

    def parts(self, start: int, stop: int) -> Iterator[str]:
        """The text of these bytes in parts of `TEXT_AT_ONCE`, each but the last up to a blank where it has one."""
        while start < stop and (data := self.read_text(start, min(stop, start + TEXT_AT_ONCE))):
            if start + len(data) < stop:
                data = data[: 1 + max(map(data.rfind, (b" ", b"\n"))) or len(data)]
            start += len(data)
            yield data.decode("utf-8", "replace")


@dataclass(frozen=True)
class Pool:
    """Documents that are searched together, each with the rows that it had when this was made.

    Row n of document d is passage `edges[d] + n`; the last edge is the number of all passages.
    """

    documents: tuple[Passages, ...]
    edges: tuple[int, ...]
    words: tuple[WordCounts, ...]

    @classmethod
    def of(cls, documents: Sequence[Passages]) -> "Pool":
        """The pool of these documents."""
        edges, words = [0], list[WordCounts]()
        for document in documents:
            words += [dataclasses.replace(each, first=edges[-1] + each.first) for each in document.words]
            edges.append(edges[-1] + document.rows)
        return cls(tuple(documents), tuple(edges), tuple(words))

    @property
    def total(self) -> int:
        """The number of passages."""
        return self.edges[-1]

    def place(self, passage: int) -> tuple[int, int]:
        """The document of a passage, and its row there."""
        document = bisect_right(self.edges, passage) - 1
        return document, passage - self.edges[document]

    def bm25(self, query: str) -> tuple[Floats, Floats]:
        """The score of each passage by its words, and the share of the query that it has, [N] each."""
        return bm25(query, self.words, self.total)

    def telling(self, query: str) -> frozenset[str]:
        """The query's words without those that most passages have; all of them where none would be left."""
        words = frozenset(words_of(query))
        number_W = _having(_hashes(words), self.words)
        telling = (word for word, number in zip(words, number_W, strict=True) if 2 * number <= self.total)
        return frozenset(telling) or words

    def cosines(self, query_D: npt.NDArray[np.float32]) -> Floats:
        """The cosine of each passage's vector and a query's, both less the mean of all where there are two, [N]."""
        mean_D = sum(document.total_D for document in self.documents) / self.total if self.total > 1 else 0.0
        scores_N, direction_D = np.zeros(self.total), directions(query_D - mean_D)
        for document, (first, stop) in zip(self.documents, pairwise(self.edges), strict=True):
            for at in range(first, stop, ROWS_AT_ONCE):
                vectors_ND = document.read(at - first, min(ROWS_AT_ONCE, stop - at)).vectors_ND
                scores_N[at : at + len(vectors_ND)] = directions(vectors_ND - mean_D) @ direction_D
        return scores_N


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
