"""One open request: the tokens that wait for the ranks, how far it has come, and what the scheduler may know of it."""

from collections import deque
from dataclasses import dataclass, field, replace

import numpy as np

from dist_attn.control.rows import GRAIN, RowAssembler, row_length, sequence_length
from dist_attn.control.scheduler import SessionView
from dist_attn.wire.messages import RowSpec, SamplingSpec

__all__ = ["Session", "TokenQueue"]

TOKEN_BYTES = 4
ROW_BYTES_PER_BLOCK = 8 << 20  # so that the rows of a step stay far below the size of a message


class TokenQueue:
    """Tokens (raw little-endian int32) in the order they came."""

    def __init__(self) -> None:
        self._pieces: deque[memoryview] = deque()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def push(self, tokens: bytes) -> None:
        """Append the tokens."""
        if tokens:
            self._pieces.append(memoryview(tokens))
            self._count += len(tokens) // TOKEN_BYTES

    def take(self, count: int) -> bytes:
        """Remove and return the first `count` tokens; there must be as many."""
        needed = count * TOKEN_BYTES
        parts: list[memoryview] = []
        while needed:
            piece = self._pieces.popleft()
            if len(piece) > needed:
                self._pieces.appendleft(piece[needed:])
                piece = piece[:needed]
            parts.append(piece)
            needed -= len(piece)
        self._count -= count
        return b"".join(parts)

    def first_outside(self, vocab_size: int) -> int | None:
        """A token that is not in [0, vocab_size), or None."""
        for piece in self._pieces:
            tokens = np.frombuffer(piece, dtype="<i4")
            outside = tokens[(tokens < 0) | (tokens >= vocab_size)]
            if len(outside):
                return int(outside[0])
        return None


@dataclass
class Session:
    """An open encoding (`rows`) or completion (`sampling`) of one API process. Times are monotonic seconds."""

    number: int
    peer: bytes
    request_id: str
    created_at: float
    rows: RowSpec | None = None
    sampling: SamplingSpec | None = None

    queue: TokenQueue = field(default_factory=TokenQueue)
    received: int = 0
    final: bool = False
    credit: int = 0
    heard_at: float = 0.0
    waiting_since: float = 0.0  # since when its oldest queued tokens wait

    opened: bool = False  # the ranks hold a state for it
    dispatched: int = 0  # tokens that are in blocks of steps
    rows_sent: int = 0
    assembler: RowAssembler | None = None
    owner: int | None = None
    draws_asked: int = 0
    draws: int = 0

    @property
    def kind(self) -> str:
        """What it is, in one word."""
        return "encoding" if self.rows is not None else "completion"

    @property
    def prefilled(self) -> bool:
        """Whether every token that a block may hold is in one; a completion's last token is left for decoding."""
        return self.final and len(self.queue) <= (self.sampling is not None and self.draws_asked == 0)

    def view(
        self, now: float, patience_s: float, hidden_size: int, blocked: bool, text_tokens: int | None = None
    ) -> SessionView:
        """What the scheduler may know of it; `text_tokens` is how much the model reads at once, None any length."""
        common = SessionView(
            session=self.number,
            opened=self.opened,
            start=self.dispatched,
            final=self.final,
            overdue=now - self.waiting_since >= patience_s,
            blocked=blocked,
        )
        if self.sampling is not None:
            ready = self.prefilled and self.draws_asked < self.sampling.max_tokens
            available = 0 if self.prefilled else max(0, len(self.queue) - 1)
            return replace(common, available=available, ready=ready, owner=self.owner)
        assert self.rows is not None
        length = row_length(self.rows)
        limit = (ROW_BYTES_PER_BLOCK // (4 * max(1, hidden_size))) * (length or ROW_BYTES_PER_BLOCK)
        common = replace(common, available=len(self.queue))
        if text_tokens is None:
            return replace(common, row_length=length, block_limit=max(GRAIN, limit))
        # No block ends at a row inside a sequence; sequences need no other rank, so short texts go around.
        grid = sequence_length(self.rows, text_tokens)
        return replace(common, grid=grid, home=self.number, block_limit=max(grid, limit))
