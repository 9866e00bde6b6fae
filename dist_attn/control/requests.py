"""One open request: what is asked, its progress in four records, and what the scheduler sees of it."""

import dataclasses
import secrets
from dataclasses import dataclass, field

import msgspec

from dist_attn.control.drawing import Drawing
from dist_attn.control.keeping import Keeping
from dist_attn.control.reading import Reading
from dist_attn.control.scheduler import RequestView
from dist_attn.model_config.figures import GRAIN
from dist_attn.rank_link.rows import SCORE_ROWS, row_length, score_width, sequence_length
from dist_attn.wire.messages import OpenWork, RowSpec
from dist_attn.wire.rank_messages import SavedState
from dist_attn.wire.specs import Terms

MOST_STORING = 2  # states on their way to the store; with more of them a session rests
ROW_BYTES_PER_BLOCK = 8 << 20  # so that the rows of a step stay below the size of a message


@dataclass
class Losses:
    """The losses of ranks while they worked on a request. Pairs are tokens read and drawn."""

    count: int = 0
    """Groups lost in a row while they worked on the request and it came no further."""
    touched_this_epoch: bool = False  # the ranks of this epoch have worked on it
    best: tuple[int, int] = (0, 0)  # what has come back from the ranks
    _saved: tuple[int, int] = (0, 0)  # the saved state at the last loss

    def add(self, saved: tuple[int, int]) -> None:
        """Count a loss of ranks that worked on this, again from 1 if a further state was saved since the last loss."""
        self.count = 1 if saved > self._saved else self.count + 1
        self._saved = saved

    def progress(self, tokens: int, draws: int) -> bool:
        """Note how far the ranks have come; true if further than ever: then this request is not what kills them."""
        further = (tokens, draws) > self.best
        if further:
            self.best, self.count = (tokens, draws), 0
        return further


@dataclass
class Request:
    """An open request of one API process; `number` is its name between the controller and the ranks.

    Times are monotonic seconds. Positions of a stored session count from its beginning, not from that of the request.
    """

    number: int
    peer: bytes
    created_at: float
    work: OpenWork
    reading: Reading = field(default_factory=Reading)
    drawing: Drawing = field(default_factory=Drawing)
    keeping: Keeping = field(default_factory=Keeping)
    losses: Losses = field(default_factory=Losses)

    @staticmethod
    def opened_by(work: OpenWork, number: int, peer: bytes, now: float, chunk: int) -> "Request":
        """A new request; blocks end at multiples of `chunk`, and so do the states that are kept on the way.

        A request without a seed gets one, so that work done again draws the same tokens; the API's requests have one.
        """
        draw = work.draw
        if draw is not None and draw.seed is None:
            draw = msgspec.structs.replace(draw, seed=secrets.randbits(63))
        at = work.begin.position if work.begin else 0
        fed_late = 1 if work.kind == "completion" else 0  # tokens, by the draw after them: decision 0033
        made = Request(
            number,
            peer,
            now,
            msgspec.structs.replace(work, draw=draw),
            Reading.from_position(at, now, held_back=fed_late),
            Drawing(draw, unfed=fed_late),
            Keeping(now, work.keep.at, (at, 0)),
            Losses(best=(at, 0)),
        )
        made.end_blocks_at(chunk)
        return made

    def end_blocks_at(self, chunk: int) -> None:
        """States on the way are kept where blocks end: at multiples of `chunk`, which ranks may tell only later."""
        keep = self.work.keep
        keep = msgspec.structs.replace(keep, every=-(-keep.every // chunk) * chunk)
        self.work = msgspec.structs.replace(self.work, keep=keep)

    # ---- what it is ----------------------------------------------------------------------------

    @property
    def request_id(self) -> str:
        """The name of the request between the controller and its API process."""
        return self.work.request_id

    @property
    def terms(self) -> Terms:
        """The terms of the request: its priority, its deadline and its announced length."""
        return self.work.terms

    @property
    def is_session(self) -> bool:
        """Return whether the work is on a stored session."""
        return self.work.keep.end

    @property
    def has_states(self) -> bool:
        """Return whether states travel between the request and its API process."""
        return self.is_session or self.work.begin is not None or bool(self.keeping.states_at)

    @property
    def scores(self) -> int | None:
        """The number of likeliest tokens told beside each token of the prompt; None: the prompt is not scored."""
        draw = self.work.draw
        return None if draw is None or self.is_session else draw.prompt_logprobs

    def row_form(self, hidden_size: int) -> tuple[RowSpec, int] | None:
        """The form of the rows that the ranks make, and the numbers in one of them; None where they make none."""
        if self.scores is not None:
            return SCORE_ROWS, score_width(self.scores)
        return None if self.work.rows is None else (self.work.rows, hidden_size)

    # ---- how far it is -------------------------------------------------------------------------

    @property
    def here(self) -> tuple[int, int]:
        """The tokens read and drawn, as far as the ranks have orders."""
        return self.reading.dispatched, self.drawing.asked

    @property
    def remaining(self) -> int:
        """The tokens still to be read or drawn, as far as that is known: what has come, or was announced."""
        announced = 0 if self.reading.final else (self.terms.tokens or 0)
        to_draw = max(0, self.drawing.most - self.drawing.asked)
        return max(self.reading.received, announced) - self.reading.dispatched + to_draw

    @property
    def length(self) -> int:
        """The most tokens that will have been read and drawn at the end, as far as they have come or were asked for."""
        return self.reading.received + self.drawing.most

    @property
    def fed(self) -> int:
        """The most tokens that the model will have been fed at the end: of a completion all but the last drawn one."""
        return self.length - (self.drawing.unfed if self.drawing.most else 0)

    @property
    def is_read(self) -> bool:
        """Return whether this is an encoding of which every token is in a block."""
        return self.work.kind == "encoding" and self.reading.prefilled

    @property
    def is_restored(self) -> bool:
        """Return whether the state that the request begins with is here."""
        return self.work.begin is None or self.keeping.saved is not None

    def deadline_passed(self, now: float) -> bool:
        """Return whether the deadline for the result has passed."""
        limit = self.terms.deadline_s
        return limit is not None and now - self.created_at >= limit

    # ---- its states ----------------------------------------------------------------------------

    @property
    def awaits_save(self) -> bool:
        """Return whether the ranks' orders reach a place where the request's state is to be handed out."""
        keeping = self.keeping
        if keeping.ranks_done or self.drawing.rewinding or not keeping.on_ranks:
            return False
        tokens, draws = self.here
        if not self.is_session:
            return tokens in keeping.states_at and not draws and self.here != keeping.asked_at
        if self.reading.prefilled and not self.drawing.may_ask:
            return not keeping.end_asked
        every = self.work.keep.every
        return bool(every) and (tokens + draws) % every == 0 and self.here != keeping.asked_at

    @property
    def is_at_its_end(self) -> bool:
        """Return whether the last saved state of a stored session is the one at its end."""
        saved = self.keeping.saved
        complete = self.reading.final and self.drawing.complete
        return complete and saved is not None and saved.position == self.reading.received + self.drawing.sent

    def hands_out(self, saved: SavedState) -> bool:
        """Return whether the API asked for a state that was saved on the way; others are saved for a loss alone."""
        if not self.is_session:
            return saved.snapshot and saved.position in self.keeping.states_at
        every = self.work.keep.every
        return bool(every) and saved.position % every == 0

    def ask_state(self, now: float) -> int:
        """Ask the ranks for the state after their present orders; returns the number of that state."""
        at_end = self.is_session and self.reading.prefilled and not self.drawing.may_ask
        return self.keeping.ask(self.here, now, at_end=at_end)

    def commit(self, saved: SavedState) -> None:
        """Note a saved state: after a loss, work goes on from it."""
        self.reading.commit(saved)
        self.drawing.commit(saved.draws)
        self.keeping.keep(saved)

    # ---- on the ranks --------------------------------------------------------------------------

    def open(self, now: float) -> None:
        """Note that the ranks, or the one that draws for it, begin with the request."""
        self.keeping.open(self.reading.dispatched, now)
        self.losses.touched_this_epoch = True

    def end_swap(self) -> None:
        """Let a request that was put aside go on once its newest state is here; the ranks know nothing of it."""
        if self.keeping.swapping_out and self.reading.saved == self.reading.dispatched:
            self.keeping.swapped_out()
            self.losses.touched_this_epoch = False

    def finish(self) -> bool:
        """Note that the ranks have no more to do; true if they must be told to forget the request."""
        self.losses.touched_this_epoch = False
        return self.keeping.finish()

    def rewind(self) -> int:
        """Go back to the last saved state; returns how many tokens will be read or drawn again.

        What was sent to the client stays sent: it is made again, and not sent again.
        """
        again = self.reading.rewind() + self.drawing.rewind()
        self.keeping.rewind(self.here)
        self.losses.touched_this_epoch = False
        return again

    def count_loss(self) -> None:
        """Count a group that was lost while it worked on this request."""
        self.losses.add((self.reading.saved, self.drawing.saved))


@dataclass(frozen=True)
class Cutting:
    """The way in which texts are cut into blocks. Units: tokens of all ranks together.

    `text_tokens` is how much the model reads at once, None any length. A text that has read `stay_tokens` in its place
    may be put aside; None: never.
    """

    chunk: int
    hidden_size: int = 0
    text_tokens: int | None = None
    stay_tokens: int | None = None


def view_of(request: Request, cutting: Cutting, blocked: bool) -> RequestView:
    """The request as the scheduler sees it; `blocked`: its reader is slow, or another suspect request goes first."""
    reading, keeping, drawing = request.reading, request.keeping, request.drawing
    view = RequestView(
        number=request.number,
        caller=request.terms.caller,
        opened=keeping.on_ranks,
        start=reading.dispatched,
        final=reading.final,
        blocked=blocked or keeping.swapping_out,
        chunk=cutting.chunk,
        available=reading.available,
        priority=request.terms.priority,
        queued_at=keeping.queued_at,
        swappable=keeping.on_ranks
        and not request.is_session
        and not reading.prefilled
        and cutting.stay_tokens is not None
        and reading.dispatched - keeping.place_at >= cutting.stay_tokens,
    )
    ready = reading.prefilled and drawing.may_ask
    if request.is_session:
        waits = not request.is_restored or drawing.rewinding or keeping.ranks_done
        rests = waits or len(keeping.storing) > MOST_STORING
        owner = drawing.logits_rank if ready and drawing.owner is None else drawing.owner
        blocked = blocked or rests
        return dataclasses.replace(view, blocked=blocked, home=request.number, ready=ready, owner=owner)
    if request.work.rows is not None:
        return _cut_rows(view, request.work.rows, cutting)
    # A request ends with its last token: by then the scores of its prompt must have come from every rank.
    ready = ready and (request.scores is None or reading.prefill_done)
    return dataclasses.replace(view, ready=ready, owner=drawing.owner)


def _cut_rows(view: RequestView, rows: RowSpec, cutting: Cutting) -> RequestView:
    """Cut an encoding so that no block has too many rows, and none ends inside a sequence."""
    length, of_sequences = row_length(rows), cutting.text_tokens is not None
    grid = GRAIN if cutting.text_tokens is None else sequence_length(rows, cutting.text_tokens)
    # Texts without rows of a length are summed up to every multiple of the grid.
    row_bytes = -(-4 * cutting.hidden_size // (1 if rows.marked else length or grid))
    chunk = max(1, min(view.chunk, ROW_BYTES_PER_BLOCK // max(1, row_bytes)) // grid) * grid
    # Texts too short to be cut go to the ranks in turn, by their numbers: one rank alone reads a sequence, or a short
    # text of a stream encoder. Where a longer text ends on a rank that depends on nothing else, so do its bits.
    whole = view.start == 0 and view.available < chunk  # such a text is cut only once it is whole
    home = view.number if of_sequences or whole else 0
    return dataclasses.replace(view, grid=grid, chunk=chunk, row_bytes=row_bytes, home=home)
