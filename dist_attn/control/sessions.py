"""One open request: the tokens that wait for the ranks, how far it has come, and what the scheduler may know of it."""

from dataclasses import dataclass, field, replace

from dist_attn.control.journal import Journal
from dist_attn.control.scheduler import SessionView
from dist_attn.control.session_states import Arrival, Offers, Saves
from dist_attn.control.token_queue import TokenQueue
from dist_attn.rank_link.rows import GRAIN, SCORE_ROWS, RowAssembler, row_length, score_width, sequence_length
from dist_attn.wire.messages import OpenCompletion, OpenEncoding, RowSpec, SamplingSpec
from dist_attn.wire.rank_messages import SavedState
from dist_attn.wire.session_messages import BeginState, OpenSession
from dist_attn.wire.terms import Terms

__all__ = ["Session"]

MOST_OFFERS = 2  # states that wait to be fetched; with more of them a session rests
ROW_BYTES_PER_BLOCK = 8 << 20  # so that the rows of a step stay below the size of a message


@dataclass
class Session:
    """An open encoding (`rows`), completion (`sampling`) or work on a stored session (`work`) of one API process.

    Times are monotonic seconds. Positions of a stored session count from its beginning, not from that of the request.
    """

    number: int
    peer: bytes
    request_id: str
    created_at: float
    rows: RowSpec | None = None
    sampling: SamplingSpec | None = None
    work: OpenSession | None = None
    begin: BeginState | None = None  # the stored state that it begins with
    every: int = 0  # states are handed out at multiples of it; 0: only at the end
    states_at: tuple[int, ...] = ()  # where a completion hands out states of its prompt

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
    draw_limit: int | None = None  # where drawing ends before `max_tokens`
    draining: bool = False  # too much was drawn: once the ranks owe nothing more, it goes back

    journal: Journal = field(default_factory=Journal)
    saved: SavedState | None = None  # the state that the journal begins after; None: the empty one
    saves: Saves = field(default_factory=Saves)
    saved_at: tuple[int, int] = (0, 0)  # tokens and draws at which a state was last asked for
    end_asked: bool = False  # the state at the end was asked for
    ended: bool = False  # it has come: what is left is to hand it out
    holder: int | None = None  # the rank that has the logits after the last token that was read; None: all, or none
    arrival: Arrival | None = None
    offers: Offers = field(default_factory=Offers)
    exposed: bool = False  # the ranks of this epoch have worked on it
    terms: Terms = field(default_factory=Terms)
    queued_at: float = 0.0  # since when it waits for a place among the states
    opened_at: int = 0  # tokens that it had read when it got its place
    leaving: bool = False  # its state is on its way here, and it rests until that has come
    losses: int = 0  # groups lost in a row while they worked on it and it came no further
    lost_at: tuple[int, int] = (0, 0)  # of the saved state at the last loss: tokens and draws
    save_asked_s: float = 0.0  # when its state was asked for, or it was opened
    best: tuple[int, int] = (0, 0)  # tokens and draws that have come back from the ranks
    read: int = 0  # every rank has answered for the text up to here

    @staticmethod
    def opened_by(
        message: OpenEncoding | OpenCompletion | OpenSession, number: int, peer: bytes, now: float, chunk: int
    ) -> "Session":
        """A new request; blocks end at multiples of `chunk`."""
        session = Session(number, peer, message.request_id, now, heard_at=now, queued_at=now, terms=message.terms)
        if not isinstance(message, OpenCompletion):
            session.rows = message.rows
        if not isinstance(message, OpenEncoding):
            session.sampling, session.begin = message.sampling, message.begin
        if isinstance(message, OpenSession):
            session.work, session.every = message, -(-message.checkpoint_tokens // chunk) * chunk
        elif isinstance(message, OpenCompletion):
            session.states_at = message.states_at
        at = session.begin.position if session.begin else 0
        session.received = session.dispatched = session.credit = session.read = at
        session.journal = Journal(position=at, unfed=0 if session.work is not None else 1)
        session.best = session.saved_at = (at, 0)
        return session

    @property
    def kind(self) -> str:
        """What it is, in one word."""
        if self.work is not None:
            return "session"
        return "encoding" if self.rows is not None else "completion"

    @property
    def prefilled(self) -> bool:
        """Whether every token that a block may hold is in one; a completion's last token is left for decoding."""
        left = self.sampling is not None and self.work is None and self.draws_asked == 0
        return self.final and len(self.queue) <= left

    @property
    def scores(self) -> int | None:
        """How many likeliest tokens are told of beside each token of the prompt; None: the prompt is not scored."""
        return None if self.sampling is None or self.work is not None else self.sampling.prompt_logprobs

    def row_form(self, hidden_size: int) -> tuple[RowSpec, int] | None:
        """The rows that the ranks make of it and how many numbers are in one; None where they make none."""
        if self.scores is not None:
            return SCORE_ROWS, score_width(self.scores)
        return None if self.rows is None else (self.rows, hidden_size)

    @property
    def prompt_is_done(self) -> bool:
        """Whether every rank has answered for all of a completion's prompt that is in blocks."""
        return self.prefilled and self.read >= self.received - 1

    @property
    def may_draw(self) -> bool:
        """Whether fewer tokens are asked of the ranks than the request wants."""
        return self.draws_asked < self.most_draws and not self.draining

    @property
    def most_draws(self) -> int:
        """How many tokens are drawn at most, as far as is known now."""
        most = 0 if self.sampling is None else self.sampling.max_tokens
        return most if self.draw_limit is None else min(most, self.draw_limit)

    @property
    def remaining(self) -> int:
        """Tokens that are still to be read or drawn, as far as that is known: what has come, or was announced."""
        announced = 0 if self.final else (self.terms.tokens or 0)
        to_draw = max(0, self.most_draws - self.draws_asked)
        return max(self.received, announced) - self.dispatched + to_draw

    @property
    def is_read(self) -> bool:
        """Whether it is an encoding of which every token is in a block."""
        return self.kind == "encoding" and self.prefilled

    @property
    def restored(self) -> bool:
        """Whether the state that it begins with is here."""
        return self.begin is None or self.saved is not None

    @property
    def has_states(self) -> bool:
        """Whether states travel between it and its API process."""
        return self.work is not None or self.begin is not None or bool(self.states_at)

    @property
    def awaits_save(self) -> bool:
        """Whether it stands now where its state shall be handed out, as far as the ranks have orders."""
        if self.ended or self.draining or not self.opened:
            return False
        if self.work is None:
            here = (self.dispatched, self.draws_asked)
            return self.dispatched in self.states_at and not self.draws_asked and here != self.saved_at
        if self.prefilled and not self.may_draw:
            return not self.end_asked
        at = self.dispatched + self.draws_asked
        return bool(self.every) and at % self.every == 0 and (self.dispatched, self.draws_asked) != self.saved_at

    @property
    def is_at_its_end(self) -> bool:
        """Whether the last saved state of a stored session is the one at its end."""
        end = self.received + self.draws
        return self.final and self.draws >= self.most_draws and self.saved is not None and self.saved.position == end

    def hands_out(self, saved: SavedState) -> bool:
        """Whether a state that was saved on the way was asked for by the API, and not for a loss alone."""
        if self.work is None:
            return saved.snapshot and saved.position in self.states_at
        return bool(self.every) and saved.position % self.every == 0

    def text_position(self, saved: SavedState) -> int:
        """How much of the input is in a saved state."""
        if self.work is not None:
            return saved.position - saved.draws
        # The last token of a prompt is fed by the first draw.
        return self.received if saved.draws else saved.position

    def put_aside(self, now: float) -> None:
        """Its place goes to another: it rests until its state is here, and then waits like one that has just come."""
        self.opened, self.leaving, self.queued_at = False, True, now
        self.saved_at = (self.dispatched, self.draws_asked)

    def arrived(self) -> None:
        """Its newest state is here; if it was put aside, it may go on from there, and the ranks know nothing of it."""
        if self.leaving and self.journal.position == self.dispatched:
            self.leaving = self.exposed = False

    def rewind(self) -> int:
        """The ranks are lost: go back to the last saved state; how many tokens will be done again.

        What was sent to the client stays sent: it is made again, and not sent again.
        """
        journal = self.journal
        again = len(journal.given) + self.draws_back - journal.draws
        self.queue.push_front(journal.given)
        self.dispatched, self.draws_asked, self.draws_back = journal.position, journal.draws, journal.draws
        self.saved_at = (journal.position, journal.draws)
        self.saves.clear()
        self.opened, self.exposed, self.leaving, self.owner = False, False, False, None
        self.end_asked, self.draining, self.holder = False, False, None
        if self.assembler is not None:
            self.assembler.rewind()
        return again

    def count_loss(self) -> None:
        """A group was lost while it worked on this; where a further state was saved since the last loss, the first."""
        saved = (self.journal.position, self.journal.draws)
        self.losses = 1 if saved > self.lost_at else self.losses + 1
        self.lost_at = saved

    def deadline_passed(self, now: float) -> bool:
        """Whether its result is of no use any more."""
        limit = self.terms.deadline_s
        return limit is not None and now - self.created_at >= limit

    def progress(self, tokens: int, draws: int) -> bool:
        """The ranks have come so far; whether further than ever: then this request is not what kills them."""
        further = (tokens, draws) > self.best
        if further:
            self.best, self.losses = (tokens, draws), 0
        return further

    def view(
        self,
        now: float,
        patience_s: float,
        hidden_size: int,
        blocked: bool,
        chunk: int,
        text_tokens: int | None = None,
        stay_tokens: int | None = None,
    ) -> SessionView:
        """What the scheduler may know of it: `chunk` tokens at most to a block (all ranks together).

        `text_tokens` is how much the model reads at once, None any length. Once it has read `stay_tokens` in its place
        its state may be put aside; None: never.
        """
        common = SessionView(
            session=self.number,
            opened=self.opened,
            start=self.dispatched,
            final=self.final,
            overdue=now - self.waiting_since >= patience_s,
            blocked=blocked or self.leaving,
            chunk=chunk,
            due=self.journal.due(self.dispatched),
            priority=self.terms.priority,
            queued_at=self.queued_at,
            swappable=self.opened
            and self.work is None
            and not self.prefilled
            and stay_tokens is not None
            and self.dispatched - self.opened_at >= stay_tokens,
        )
        if self.work is not None:
            # However slowly its text comes: it is always cut into the same blocks.
            rests = not self.restored or self.draining or self.ended or len(self.offers.waiting) > MOST_OFFERS
            ready = self.prefilled and self.may_draw
            owner = self.holder if ready and self.owner is None else self.owner
            common = replace(common, overdue=False, blocked=blocked or rests, home=self.number)
            return replace(common, available=len(self.queue), ready=ready, owner=owner)
        if self.sampling is not None:
            # A request ends with its last token: by then the scores of its prompt must have come from every rank.
            ready = self.prefilled and self.may_draw and (self.scores is None or self.prompt_is_done)
            available = 0 if self.prefilled else max(0, len(self.queue) - 1)
            # As those of sessions, states that are kept for others always come of the same blocks.
            overdue = common.overdue and not self.has_states
            return replace(common, available=available, ready=ready, owner=self.owner, overdue=overdue)
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
