"""The bytes of a text at which its rows begin and end, from the lengths of its tokens."""

from collections import deque
from typing import Any, final

import numpy as np
import numpy.typing as npt

from dist_attn.errors import WireError
from dist_attn.text.base import TokenArray
from dist_attn.text.cuts import marked_ends
from dist_attn.wire.specs import RowSpec


@final
class ByteOffsets:
    """The bytes of the input at which rows end, kept only for rows that are still to come.

    Lengths are pushed from token `tokens` on, which begins at byte `size`; the next row begins at `edge`, as (token,
    byte), and not before them.
    """

    def __init__(self, spec: RowSpec, tokens: int = 0, size: int = 0, edge: tuple[int, int] = (0, 0)) -> None:
        self._every = {"token": 1, "window": spec.window}.get(spec.granularity, 0)
        self.tokens = tokens
        self.bytes = size
        self._ends: deque[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]] = deque()  # (tokens, bytes)
        self.edge = edge
        """The token and the byte at which the next row begins."""

    def push(
        self, byte_lengths: npt.NDArray[np.integer[Any]], tokens: TokenArray | None = None
    ) -> npt.NDArray[np.int64]:
        """Take the next tokens of the input by their lengths in bytes, and themselves where rows are marked.

        Returns the tokens and bytes at which rows end among these, [N, 2], but not the end of a text's last row.
        """
        count = len(byte_lengths)
        ends = self.bytes + np.cumsum(byte_lengths, dtype=np.int64)
        at = np.empty(0, dtype=np.int64)
        if self._every and count:
            first = self.tokens + self._every - self.tokens % self._every
            at = np.arange(first, self.tokens + count + 1, self._every, dtype=np.int64)
        elif tokens is not None:
            at = marked_ends(tokens, self.tokens)
        found_N2 = np.column_stack((at, ends[at - self.tokens - 1]))
        if len(at):
            self._ends.append((at, found_N2[:, 1]))
        self.tokens += count
        self.bytes = int(ends[-1]) if count else self.bytes
        return found_N2

    def ranges(self, starts: list[int], stops: list[int]) -> list[tuple[int, int]]:
        """Take the byte ranges of the next rows, which must follow each other without a gap.

        Raises: WireError when these are not the rows that were asked for.
        """
        result = []
        for start, stop in zip(starts, stops, strict=True):
            token, begin = self.edge
            if start != token:
                raise WireError(f"a row came from token {start} where {token} was due")
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
        raise WireError(f"a row came that ends at token {stop}, which no row was asked to do")
