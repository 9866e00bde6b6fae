"""Rows as NDJSON: byte offsets of their token ranges, floats in the fewest digits that keep float32."""

from collections import deque

import msgspec
import numpy as np
import numpy.typing as npt

from dist_attn.wire.messages import Rows, RowSpec
from service.errors import EngineFailure

__all__ = ["FLOATS_PER_CALL", "ByteOffsets", "RowLine", "format_rows", "shortest_float32"]

FLOATS_PER_CALL = 1 << 15  # about 4 ms of formatting: other threads get their turn
_POWERS_OF_TEN = np.array([float(f"1e{k}") for k in range(64)])


class RowLine(msgspec.Struct):
    """One line of the answer; ranges are in tokens and bytes of the input, stops exclusive."""

    index: int
    start: int
    stop: int
    byte_start: int
    byte_stop: int
    embedding: list[float]


class ByteOffsets:
    """Where in the input's bytes each row ends, kept only for rows that are still to come."""

    def __init__(self, spec: RowSpec) -> None:
        self._every = {"token": 1, "window": spec.window}.get(spec.granularity, 0)
        self.tokens = 0
        self.bytes = 0
        self._ends: deque[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]] = deque()  # (tokens, bytes)
        self._row_start = (0, 0)

    def push(self, byte_lengths: npt.NDArray[np.integer]) -> None:
        """The next tokens of the input, by their lengths in bytes."""
        count = len(byte_lengths)
        ends = self.bytes + np.cumsum(byte_lengths, dtype=np.int64)
        if self._every and count:
            first = self.tokens + self._every - self.tokens % self._every
            at = np.arange(first, self.tokens + count + 1, self._every, dtype=np.int64)
            if len(at):
                self._ends.append((at, ends[at - self.tokens - 1]))
        self.tokens += count
        self.bytes = int(ends[-1]) if count else self.bytes

    def ranges(self, starts: list[int], stops: list[int]) -> list[tuple[int, int]]:
        """Byte ranges of the next rows, which must follow each other without a gap.

        Raises: EngineFailure when these are not the rows that were asked for.
        """
        result = []
        for start, stop in zip(starts, stops, strict=True):
            token, begin = self._row_start
            if start != token:
                raise EngineFailure(f"the engine sent a row from token {start} where {token} was due")
            self._row_start = (stop, self._end(stop))
            result.append((begin, self._row_start[1]))
        return result

    def _end(self, stop: int) -> int:
        while self._ends:
            at, ends = self._ends[0]
            place = int(np.searchsorted(at, stop))
            if place < len(at) and at[place] == stop:
                if place == len(at) - 1:
                    self._ends.popleft()
                return int(ends[place])
            if place < len(at):
                break
            self._ends.popleft()
        if stop == self.tokens:
            return self.bytes
        raise EngineFailure(f"the engine sent a row that ends at token {stop}, which no row was asked to do")


def shortest_float32(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """For each value the float64 that prints with the fewest digits and still reads back as that float32.

    A float32 needs at most 9 significant digits; 7 or 8 are tried first. Scaling by a power of ten up to
    10^22 is exact in float64, so the rounded quotient prints as the short decimal itself.
    """
    exact = values.astype(np.float64)
    size = np.abs(exact)
    exponent = np.floor(np.log10(np.where(size == 0, 1.0, size))).astype(np.int64)
    best = exact.copy()
    for digits in (9, 8, 7):
        shift = digits - 1 - exponent
        scale = _POWERS_OF_TEN[np.abs(shift)]
        rounded = np.where(shift >= 0, np.rint(exact * scale) / scale, np.rint(exact / scale) * scale)
        best = np.where(rounded.astype(np.float32) == values, rounded, best)
    return best


def format_rows(rows: Rows, first: int, count: int, ranges: list[tuple[int, int]], dim: int) -> bytes:
    """NDJSON lines of rows [first, first + count) of one message; `ranges` are the byte ranges of exactly these.

    Raises: EngineFailure when a vector holds a value that is not a number.
    """
    vectors = np.frombuffer(rows.vectors, dtype="<f4", count=count * dim, offset=4 * first * dim).reshape(count, dim)
    if not np.isfinite(vectors).all():
        raise EngineFailure(f"the engine computed a value that is not finite near row {rows.first_row + first}")
    lines = [
        RowLine(rows.first_row + i, rows.starts[i], rows.stops[i], *span, embedding=values)
        for i, span, values in zip(range(first, first + count), ranges, shortest_float32(vectors).tolist(), strict=True)
    ]
    return msgspec.json.Encoder().encode_lines(lines)
