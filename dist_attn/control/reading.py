"""The input of one request: tokens that wait for the ranks, tokens given to them, and those to read again on a loss."""

from collections import deque
from dataclasses import dataclass, field
from typing import final

import numpy as np

from dist_attn.rank_link.rows import RowAssembler, RowBatch
from dist_attn.text.cuts import unmarked
from dist_attn.wire.messages import RowSpec
from dist_attn.wire.rank_messages import RowPieces, SavedState

TOKEN_BYTES = 4


@final
class TokenQueue:
    """Tokens in the order they came, as raw little-endian int32; no piece is copied before it is taken."""

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

    @property
    def first(self) -> int:
        """The first token; there must be one."""
        return int.from_bytes(self._pieces[0][:TOKEN_BYTES], "little")

    def take(self, count: int) -> bytes:
        """Remove and return the first `count` tokens; there must be as many."""
        return b"".join(self._first(count))

    def drop(self, count: int) -> None:
        """Remove the first `count` tokens; there must be as many."""
        self._first(count)

    def push_front(self, earlier: "TokenQueue") -> None:
        """Put all tokens of `earlier` before these; it is empty afterwards."""
        self._pieces.extendleft(reversed(earlier._pieces))
        self._count += earlier._count
        earlier._pieces.clear()
        earlier._count = 0

    def first_outside(self, vocab_size: int, *, marked: bool = False) -> int | None:
        """The first token outside [0, vocab_size), or None; `marked`: once the marks of RowSpec.marked are removed."""
        for piece in self._pieces:
            tokens = np.frombuffer(piece, dtype="<i4")
            if marked:
                tokens = unmarked(tokens)
            outside = tokens[(tokens < 0) | (tokens >= vocab_size)]
            if len(outside):
                return int(outside[0])
        return None

    def _first(self, count: int) -> list[memoryview]:
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
        return parts


@dataclass
class Reading:
    """The progress of the input; positions count from the beginning of the text or of the stored session.

    Tokens from `saved` on are kept here until a later state is saved. Memory: 4 bytes for each of them. Times are
    monotonic seconds.
    """

    start: int = 0
    held_back: int = 0  # tokens at the end that are in no block: the first draw feeds a completion's last one
    received: int = 0
    final: bool = False  # none will follow what was received
    credit: int = 0
    heard_at: float = 0.0
    dispatched: int = 0  # tokens that are in blocks of steps
    done: int = 0  # every rank has answered for the text up to here
    saved: int = 0  # how much of the text is in the last saved state
    assembler: RowAssembler | None = None
    queue: TokenQueue = field(default_factory=TokenQueue)
    _given: TokenQueue = field(default_factory=TokenQueue)  # to the ranks, since the last saved state

    @classmethod
    def from_position(cls, start: int, now: float, held_back: int = 0) -> "Reading":
        """The input of a request that begins with the state after `start` tokens."""
        return cls(start, held_back, start, credit=start, heard_at=now, dispatched=start, done=start, saved=start)

    # ---- from the API --------------------------------------------------------------------------

    def hear(self, now: float) -> None:
        """Note that its API process has said something about the request."""
        self.heard_at = now

    def grant(self, upto: int, now: float) -> None:
        """Let the API send tokens up to this position."""
        self.credit, self.heard_at = upto, now

    def refusal(self, start: int, tokens: bytes) -> str:
        """Say why these tokens cannot be the next ones; empty when they can."""
        number, rest = divmod(len(tokens), TOKEN_BYTES)
        stop = start + number
        if not rest and not self.final and start == self.received and stop <= self.credit:
            return ""
        return (
            f"tokens [{start}, {stop}) of {len(tokens)} bytes do not follow: needed are whole "
            f"int32 from {self.received} up to {self.credit}" + (", none after the end" * self.final)
        )

    def push(self, tokens: bytes, final: bool, now: float) -> None:
        """Take the next tokens in; `final`: they are the last ones."""
        self.queue.push(tokens)
        self.received, self.final, self.heard_at = self.received + len(tokens) // TOKEN_BYTES, final, now

    # ---- to the ranks --------------------------------------------------------------------------

    @property
    def available(self) -> int:
        """The number of tokens that may go into blocks now."""
        return max(0, len(self.queue) - self.held_back)

    @property
    def prefilled(self) -> bool:
        """Return whether every token that a block may hold is in one."""
        return self.final and not self.available

    @property
    def prefill_done(self) -> bool:
        """Return whether every rank has answered for all of these blocks."""
        return self.prefilled and self.done >= self.received - self.held_back

    def tokens_in(self, saved: SavedState) -> int:
        """The number of input tokens in a saved state."""
        return saved.position - saved.draws + (self.held_back if saved.draws else 0)

    def take(self, count: int) -> bytes:
        """Take the next tokens, for a rank; they are kept for the case of a loss."""
        tokens = self.queue.take(count)
        self._given.push(tokens)
        return tokens

    def end_block(self, tokens: int) -> None:
        """Count a block of `tokens` tokens that was taken."""
        self.dispatched += tokens

    def reached(self, position: int) -> None:
        """Note that every rank has answered for the text up to `position`."""
        self.done = max(self.done, position)

    def commit(self, saved: SavedState) -> None:
        """Note that a state was saved: what it holds will not be needed again."""
        position = self.tokens_in(saved)
        self._given.drop(position - self.saved)
        self.saved = position

    def rewind(self) -> int:
        """Go back to the last saved state; returns how many tokens will be read again."""
        again = len(self._given)
        self.queue.push_front(self._given)
        self.dispatched = self.saved
        if self.assembler is not None:
            self.assembler.rewind()
        return again

    # ---- rows ----------------------------------------------------------------------------------

    def add_rows(self, pieces: RowPieces, form: tuple[RowSpec, int]) -> list[RowBatch]:
        """Take a rank's pieces of rows; returns the rows that they complete.

        Raises: WireError for pieces that do not fit.
        """
        if self.assembler is None:
            self.assembler = RowAssembler(*form, self.start)
        return self.assembler.add(pieces, self.received if self.final else None)

    def last_rows(self) -> list[RowBatch]:
        """The last, shorter row where the end of the input became known after its tokens."""
        return [] if self.assembler is None else self.assembler.finish(self.received)

    @property
    def rows_complete(self) -> bool:
        """Return whether every token that was received is in a row."""
        return (0 if self.assembler is None else self.assembler.position) == self.received

    @property
    def rows_sent(self) -> int:
        """The number of rows that were complete so far; each was sent at once."""
        return 0 if self.assembler is None else self.assembler.rows
