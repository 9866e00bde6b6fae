"""Rows: what the engine sends with byte offsets of its token ranges, and as NDJSON in the fewest digits of float32."""

from collections import deque
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from dist_attn.wire.messages import Rows, RowSpec
from dist_attn_service.base.errors import EngineFailure
from dist_attn_service.base.floats import shortest_float32

__all__ = ["FLOATS_PER_CALL", "ByteOffsets", "RowBlock", "RowLine", "format_rows", "row_block"]

FLOATS_PER_CALL = 1 << 15  # about 4 ms of formatting: other threads get their turn


class RowLine(msgspec.Struct):
    """One line of the answer; ranges are in tokens and bytes of the input, stops exclusive."""

    index: int
    start: int
    stop: int
    byte_start: int
    byte_stop: int
    embedding: list[float]


@dataclass(frozen=True)
class RowBlock:
    """Some rows in order, the first of them row `first_row` of the document.

    Shapes: ranges_N4 int64, for each row start and stop in tokens, then in bytes; vectors_ND little-endian float32.
    """

    first_row: int
    ranges_N4: npt.NDArray[np.int64]
    vectors_ND: npt.NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.vectors_ND)

    def after(self, row: int) -> "RowBlock":
        """Those from row `row` of the document on."""
        drop = min(max(row - self.first_row, 0), len(self))
        return RowBlock(self.first_row + drop, self.ranges_N4[drop:], self.vectors_ND[drop:])


def row_block(rows: Rows, first: int, count: int, spans: list[tuple[int, int]], dim: int) -> RowBlock:
    """Rows [first, first + count) of one message; `spans` are the byte ranges of exactly these.

    Raises: EngineFailure when a vector holds a value that is not a number.
    """
    vectors = np.frombuffer(rows.vectors, dtype="<f4", count=count * dim, offset=4 * first * dim).reshape(count, dim)
    if not np.isfinite(vectors).all():
        raise EngineFailure(f"the engine computed a value that is not finite near row {rows.first_row + first}")
    some = slice(first, first + count)
    starts, stops = (np.array(values[some], dtype=np.int64) for values in (rows.starts, rows.stops))
    ranges = np.column_stack((starts, stops, np.array(spans, dtype=np.int64).reshape(count, 2)))
    return RowBlock(rows.first_row + first, ranges, vectors)


class ByteOffsets:
    """Where in the input's bytes each row ends, kept only for rows that are still to come.

    Lengths are pushed from token `tokens` on, which begins at byte `size`; the next row begins at `edge`, as (token,
    byte), and not before them.
    """

    def __init__(self, spec: RowSpec, tokens: int = 0, size: int = 0, edge: tuple[int, int] = (0, 0)) -> None:
        self._every = {"token": 1, "window": spec.window}.get(spec.granularity, 0)
        self.tokens = tokens
        self.bytes = size
        self._ends: deque[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]] = deque()  # (tokens, bytes)
        self.edge = edge
        """Where the next row begins: its token and its byte."""

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
            token, begin = self.edge
            if start != token:
                raise EngineFailure(f"the engine sent a row from token {start} where {token} was due")
            self.edge = (stop, self._end(stop))
            result.append((begin, self.edge[1]))
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


def format_rows(block: RowBlock) -> bytes:
    """The rows as lines of NDJSON."""
    values = shortest_float32(block.vectors_ND).tolist()
    lines = [
        RowLine(index, start, stop, begin, end, vector)
        for index, ((start, stop, begin, end), vector) in enumerate(
            zip(block.ranges_N4.tolist(), values, strict=True), block.first_row
        )
    ]
    return msgspec.json.Encoder().encode_lines(lines)
