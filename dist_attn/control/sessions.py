"""One open request: the tokens that wait for the ranks, how far it has come, and what the scheduler may know of it."""

from collections import deque
from dataclasses import dataclass, field, replace

from dist_attn.control.journal import Journal
from dist_attn.control.rows import GRAIN, RowAssembler, row_length, sequence_length
from dist_attn.control.scheduler import SessionView
from dist_attn.control.token_queue import TokenQueue
from dist_attn.wire.messages import RowSpec, SamplingSpec, SavedState

__all__ = ["Session"]

ROW_BYTES_PER_BLOCK = 8 << 20  # so that the rows of a step stay below the size of a message


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
    draws_back: int = 0  # draws that came back from the ranks; fewer than `draws` while they are made a second time
    draws: int = 0  # draws that were sent on

    journal: Journal = field(default_factory=Journal)
    saved: SavedState | None = None  # the state that the journal begins after; None: the empty one
    held: deque[SavedState] = field(default_factory=deque)  # whole, but some rank's rows before them are not back yet
    saved_at: tuple[int, int] = (0, 0)  # tokens and draws at which a state was last asked for
    exposed: bool = False  # the ranks of this epoch have worked on it
    losses: int = 0  # groups lost in a row while they worked on it and it came no further
    best: tuple[int, int] = (0, 0)  # tokens and draws that have come back from the ranks

    @property
    def kind(self) -> str:
        """What it is, in one word."""
        return "encoding" if self.rows is not None else "completion"

    @property
    def prefilled(self) -> bool:
        """Whether every token that a block may hold is in one; a completion's last token is left for decoding."""
        return self.final and len(self.queue) <= (self.sampling is not None and self.draws_asked == 0)

    @property
    def may_draw(self) -> bool:
        """Whether fewer tokens are asked of the ranks than the request wants."""
        return self.sampling is not None and self.draws_asked < self.sampling.max_tokens

    @property
    def is_read(self) -> bool:
        """Whether it is an encoding of which every token is in a block."""
        return self.rows is not None and self.prefilled

    def rewind(self) -> int:
        """The ranks are lost: go back to the last saved state; how many tokens will be done again.

        What was sent to the client stays sent: it is made again, and not sent again.
        """
        journal = self.journal
        again = len(journal.given) + self.draws_back - journal.draws
        self.queue.push_front(journal.given)
        self.dispatched, self.draws_asked, self.draws_back = journal.position, journal.draws, journal.draws
        self.saved_at = (journal.position, journal.draws)
        self.held.clear()
        self.opened, self.exposed, self.owner = False, False, None
        if self.assembler is not None:
            self.assembler.rewind()
        return again

    def progress(self, tokens: int, draws: int) -> None:
        """The ranks have come so far; further than ever before means that this request is not what kills them."""
        if (tokens, draws) > self.best:
            self.best, self.losses = (tokens, draws), 0

    def view(
        self,
        now: float,
        patience_s: float,
        hidden_size: int,
        blocked: bool,
        chunk: int,
        text_tokens: int | None = None,
    ) -> SessionView:
        """What the scheduler may know of it: `chunk` tokens at most to a block (all ranks together).

        `text_tokens` is how much the model reads at once, None any length.
        """
        common = SessionView(
            session=self.number,
            opened=self.opened,
            start=self.dispatched,
            final=self.final,
            overdue=now - self.waiting_since >= patience_s,
            blocked=blocked,
            chunk=chunk,
            due=self.journal.due(self.dispatched),
        )
        if self.sampling is not None:
            ready = self.prefilled and self.may_draw
            available = 0 if self.prefilled else max(0, len(self.queue) - 1)
            return replace(common, available=available, ready=ready, owner=self.owner)
        assert self.rows is not None
        length = row_length(self.rows)
        # No block ends at a row inside a sequence; sequences need no other rank, so short texts go around.
        grid = GRAIN if text_tokens is None else sequence_length(self.rows, text_tokens)
        limit = (ROW_BYTES_PER_BLOCK // (4 * max(1, hidden_size))) * (length or ROW_BYTES_PER_BLOCK)
        chunk = max(1, min(chunk, limit) // grid) * grid
        common = replace(common, available=len(self.queue), grid=grid, chunk=chunk)
        if text_tokens is None:
            return replace(common, row_length=length)
        return replace(common, home=self.number)
