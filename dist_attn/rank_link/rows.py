"""The pieces of rows that a rank sums, and the assembly of pieces from all ranks into rows in order.

Pieces are cut at row edges and at the absolute grid of GRAIN tokens. Ranks are cut on the same grid, so a row is always
the same ordered sum of the same pieces and does not depend on the number of ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
import numpy.typing as npt

from dist_attn.errors import WireError
from dist_attn.model_config.figures import GRAIN
from dist_attn.wire.messages import RowSpec
from dist_attn.wire.rank_messages import RowPieces
from dist_attn.wire.specs import MODEL_POOLING

SCORE_ROWS = RowSpec("token", pooling="last")
"""The rows as which the scores of a prompt's tokens travel: one for each token, about the one that follows it."""

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]
Ends = npt.NDArray[np.bool_]


def row_length(spec: RowSpec) -> int | None:
    """The tokens of a row; None when rows have no length of their own: the document is one, or tokens are marked."""
    if spec.granularity == "document" or spec.marked:
        return None
    return 1 if spec.granularity == "token" else spec.window


def sequence_length(spec: RowSpec, text_tokens: int) -> int:
    """The tokens of a sequence for a model that reads `text_tokens` at once: the window of a row, or all of them."""
    return spec.window if spec.granularity == "window" else text_tokens


def score_width(likeliest: int) -> int:
    """Numbers in a row of scores: the token's log-probability, the ids of the likeliest tokens and their
    log-probabilities. Ids are exact in float32 below 2**24.
    """
    return 1 + 2 * likeliest


def piece_edges(start: int, stop: int, spec: RowSpec, ends: Sequence[int] = (), grain: int = GRAIN) -> Ints:
    """The positions between which a rank sums in [start, stop), both ends included; marked rows end at `ends`."""
    length = row_length(spec)
    if length == 1:
        return np.arange(start, stop + 1, dtype=np.int64)
    inner = [_multiples(grain, start, stop), np.array([end for end in ends if end < stop], dtype=np.int64)]
    if length is not None:
        inner.append(_multiples(length, start, stop))
    edges = np.unique(np.concatenate(inner))
    return np.concatenate(([start], edges, [stop])).astype(np.int64)


def _multiples(step: int, start: int, stop: int) -> Ints:
    """The multiples of `step` strictly inside (start, stop)."""
    return np.arange(start // step + 1, -(-stop // step), dtype=np.int64) * step


@dataclass(frozen=True)
class RowBatch:
    """Complete rows [first_row, first_row + n) in order.

    Shapes: starts and stops [n] (tokens), vectors [n, dim] float32.
    """

    first_row: int
    starts: Ints
    stops: Ints
    vectors: Floats


@dataclass
class _OpenRow:
    start: int
    vector: npt.NDArray[np.float64]


@final
class RowAssembler:
    """The assembler of one encoding's pieces, in order: sums in float64, mean = sum / count.

    Pieces may come in any order of ranks and steps; what is ahead of its turn waits (bounded by the steps in flight).
    """

    def __init__(self, spec: RowSpec, dim: int, start: int = 0) -> None:
        self._length = row_length(spec)
        self._mean = spec.pooling == "mean" or (spec.marked and spec.pooling == MODEL_POOLING)
        self._dim = dim
        self._waiting: dict[int, tuple[Ints, Ints, Floats, Ends]] = {}
        self._open: _OpenRow | None = None
        self._rows = 0
        self._again = 0  # pieces before this position may come a second time
        self.position = start
        """The position before which every token is in a row that has been taken, or in the one that is open."""

    @property
    def rows(self) -> int:
        """The number of complete rows so far."""
        return self._rows

    def add(self, pieces: RowPieces, total: int | None) -> list[RowBatch]:
        """Take pieces in; returns the rows that they complete. `total` is the length of the input once it is known.

        Raises: WireError for pieces that do not fit together, or arrive twice without a `rewind` between.
        """
        if not pieces.starts:
            return []
        start = self._put(pieces)
        if start != self.position:
            return []
        batches: list[RowBatch] = []
        while (segment := self._waiting.pop(self.position, None)) is not None:
            batches += self._consume(*segment, total)
        return batches

    def rewind(self) -> None:
        """Drop what is ahead of its turn, and let pieces that were added before come again."""
        self._waiting.clear()
        self._again = self.position

    def finish(self, total: int) -> list[RowBatch]:
        """Return the last, shorter row when the end of the input became known only after its tokens."""
        if self._open is None or self.position != total:
            return []
        return [self._close(total)]

    def _put(self, pieces: RowPieces) -> int:
        starts, stops = np.array(pieces.starts, dtype=np.int64), np.array(pieces.stops, dtype=np.int64)
        if len(starts) != len(stops) or len(pieces.vectors) != 4 * self._dim * len(starts):
            raise WireError(
                f"{len(starts)} starts, {len(stops)} stops and {len(pieces.vectors)} bytes of vectors do not fit: "
                f"{4 * self._dim} bytes per piece are needed"
            )
        first = int(starts[0])
        if bool((stops <= starts).any()) or bool((starts[1:] != stops[:-1]).any()):
            raise WireError(f"the row pieces from token {first} are not one gapless run of ranges")
        if (first < self.position and first >= self._again) or first in self._waiting:
            raise WireError(f"row pieces from token {first} came twice; tokens before {self.position} are done")
        vectors = np.frombuffer(pieces.vectors, dtype="<f4").reshape(len(starts), self._dim)
        ends = np.isin(stops, np.array(pieces.ends, dtype=np.int64))
        if self._length is not None:
            ends |= stops % self._length == 0
        new = int(np.searchsorted(starts, self.position)) if first < self._again else 0
        if new == len(starts):
            return first
        first = int(starts[new])
        self._waiting[first] = (starts[new:], stops[new:], vectors[new:], ends[new:])
        return first

    def _consume(self, starts: Ints, stops: Ints, vectors: Floats, ends: Ends, total: int | None) -> list[RowBatch]:
        """Go through one gapless run of pieces: whole rows in bulk, parts of rows one by one."""
        batches: list[RowBatch] = []
        if total is not None:
            ends = ends | (stops == total)
        whole = ends & np.append(self._open is None, ends[:-1])
        partial = np.append(np.flatnonzero(~whole), len(whole))
        at = 0
        while at < len(starts):
            stop = int(partial[np.searchsorted(partial, at)]) if self._open is None else at
            if stop > at:
                batches.append(self._whole_rows(starts[at:stop], stops[at:stop], vectors[at:stop]))
                at = stop
                continue
            if self._open is None:
                self._open = _OpenRow(int(starts[at]), np.zeros(self._dim, dtype=np.float64))
            self._open.vector = self._open.vector + vectors[at] if self._mean else vectors[at].astype(np.float64)
            if ends[at]:
                batches.append(self._close(int(stops[at])))
            at += 1
        self.position = int(stops[-1])
        return batches

    def _whole_rows(self, starts: Ints, stops: Ints, vectors: Floats) -> RowBatch:
        if self._mean:
            vectors = (vectors.astype(np.float64) / (stops - starts)[:, None]).astype(np.float32)
        batch = RowBatch(self._rows, starts, stops, vectors)
        self._rows += len(starts)
        return batch

    def _close(self, stop: int) -> RowBatch:
        assert self._open is not None
        start, vector = self._open.start, self._open.vector
        self._open = None
        if self._mean:
            vector = vector / (stop - start)
        batch = RowBatch(self._rows, np.array([start]), np.array([stop]), vector.astype(np.float32)[None])
        self._rows += 1
        return batch
