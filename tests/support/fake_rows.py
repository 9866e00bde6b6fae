"""The rows of the fake engine: a vector that its tokens alone decide."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from dist_attn.text.cuts import marked_ends, unmarked
from dist_attn.wire.messages import Rows, RowSpec

__all__ = ["HIDDEN", "RowMaker", "row_vector"]

HIDDEN = 8


def row_vector(tokens: npt.NDArray[np.int32], pooling: str) -> npt.NDArray[np.float32]:
    """The vector that this engine gives a row of tokens."""
    weight = np.arange(1, HIDDEN + 1, dtype=np.float32) / np.float32(7)
    number = np.float32(tokens[-1]) if pooling == "last" else np.float32(tokens.mean(dtype=np.float64))
    return (weight * number).astype(np.float32)


@dataclass
class RowMaker:
    """Rows of the tokens that come, the first of which stands at `position`."""

    name: str
    spec: RowSpec
    position: int = 0
    rows: int = 0
    _tokens: npt.NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))  # not in a row yet

    def push(self, tokens: npt.NDArray[np.int32], final: bool) -> list[Rows]:
        """The rows that these tokens complete."""
        self._tokens = np.concatenate([self._tokens, tokens])
        every = {"token": 1, "window": self.spec.window}.get(self.spec.granularity, 1 << 60)
        starts, stops, vectors, used = [], [], [], 0
        ends = marked_ends(self._tokens).tolist() if self.spec.marked else []
        while len(self._tokens) - used >= every or ends or (final and used < len(self._tokens)):
            part = unmarked(self._tokens[used : ends.pop(0) if ends else used + every])
            starts.append(self.position + used)
            used += len(part)
            stops.append(self.position + used)
            vectors.append(row_vector(part, self.spec.pooling))
        self._tokens = self._tokens[used:]
        self.position += used
        if not starts:
            return []
        data = np.stack(vectors).astype("<f4").tobytes()
        first, self.rows = self.rows, self.rows + len(starts)
        return [Rows(request_id=self.name, first_row=first, starts=starts, stops=stops, vectors=data)]
