"""Documents in a search: rows with their texts, the counts of their words and the sums of their vectors.

Letters: N passages of all documents, D model width.
"""

import asyncio
import dataclasses
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from dist_attn.text.documents import Section
from dist_attn.text.ranking import Floats, WordCounts, bm25, directions, hashes_of, having, words_of
from dist_attn_service.encodings.encoding_run import RowBlock

__all__ = ["Passages", "Pool"]

ROWS_AT_ONCE = 2048
# Bytes whose words are counted together: strings take some twenty times as much, and nothing else runs while words are
# found in them.
TEXT_AT_ONCE = 1 << 18


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
    sections: Sequence[Section] = ()
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
        number_W = having(hashes_of(words), self.words)
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
