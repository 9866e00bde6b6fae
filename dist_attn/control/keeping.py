"""The place of one request's state: on the ranks, on its way here, in the controller's files, or on its way out."""

from collections import deque
from dataclasses import dataclass, field

from dist_attn.wire.messages import StatePiece
from dist_attn.wire.rank_messages import SavedState
from dist_attn.wire.snapshot import SnapshotParser

WINDOW_BYTES = 8 << 20


@dataclass
class Saves:
    """States that were asked of the ranks. They count in the order in which they were asked for."""

    ordinal: int = 0
    """The number of the last state that was asked for; numbers begin at 1."""
    _asked: deque[int] = field(default_factory=deque)
    _came: dict[int, SavedState] = field(default_factory=dict)

    def ask(self) -> int:
        """Note that another state is asked for; returns its number."""
        self.ordinal += 1
        self._asked.append(self.ordinal)
        return self.ordinal

    def awaits(self, ordinal: int) -> bool:
        """Return whether the state was asked for and has not come; after a loss no state is awaited."""
        return ordinal in self._asked and ordinal not in self._came

    def take(self, saved: SavedState) -> None:
        """Take in a state that has come."""
        self._came[saved.ordinal] = saved

    def give_up(self, ordinal: int) -> None:
        """Forget a state that could not be kept."""
        self._asked.remove(ordinal)

    @property
    def first(self) -> SavedState | None:
        """The next state that counts, if it has come."""
        return self._came.get(self._asked[0]) if self._asked else None

    def pop(self) -> None:
        """Remove the first state: it counts now, or never will."""
        del self._came[self._asked.popleft()]

    @property
    def pending(self) -> bool:
        """Return whether any state that was asked for does not count yet."""
        return bool(self._asked)

    def clear(self) -> None:
        """Forget all states, as the ranks are lost."""
        self._asked.clear()
        self._came.clear()


@dataclass
class Arrival:
    """The state that a request begins with, as far as its bytes have come."""

    num_bytes: int
    parser: SnapshotParser
    credit: int = 0
    received: int = 0

    def due(self, piece: StatePiece) -> bool:
        """Return whether the piece follows what has come, as far as credit was given."""
        return piece.start == self.received and piece.start + len(piece.data) <= self.credit

    def feed(self, piece: StatePiece) -> None:
        """Take the piece.

        Raises: WireError, StateMismatchError for bytes of something else than a snapshot.
        """
        self.parser.feed(piece.data)
        self.received += len(piece.data)

    def grant(self) -> int | None:
        """Return the byte up to which the state may come now; None while that is not worth a message."""
        upto = min(self.num_bytes, self.received + WINDOW_BYTES)
        if upto <= self.credit or (upto < self.num_bytes and upto - self.credit < WINDOW_BYTES // 2):
            return None
        self.credit = upto
        return upto


@dataclass
class Offers:
    """States that wait to be fetched, in order; the first one has been announced."""

    waiting: deque[SavedState] = field(default_factory=deque)
    position: int = -1  # of the newest: what is saved again after a loss is not offered again
    since: float = 0.0  # when the reader last took something, or had nothing to take
    credit: int = 0  # bytes of the first one
    sent: int = 0

    def add(self, saved: SavedState) -> bool:
        """Add a state; true if it is the first, and must be announced."""
        self.position = saved.position
        self.waiting.append(saved)
        return len(self.waiting) == 1

    def announce(self, now: float) -> SavedState:
        """Note that the first state is announced now, and return it."""
        self.since, self.credit, self.sent = now, 0, 0
        return self.waiting[0]

    def grant(self, position: int, upto: int, now: float) -> SavedState | None:
        """Let the reader take more of the first state; None if that stands at another position."""
        if not self.waiting or self.waiting[0].position != position:
            return None
        self.since = now
        self.credit = min(max(self.credit, upto), self.waiting[0].num_bytes)
        return self.waiting[0]

    def advance(self, count: int) -> None:
        """Count bytes of the first state that were sent."""
        self.sent += count

    def pop(self) -> None:
        """Remove the first state, which has been fetched or is given up."""
        self.waiting.popleft()


@dataclass
class Keeping:
    """The state of one request. Times are monotonic seconds; pairs are tokens read and drawn."""

    queued_at: float = 0.0  # since when it waits for a place among the states
    states_at: tuple[int, ...] = ()  # where a completion hands out states of its prompt
    asked_at: tuple[int, int] = (0, 0)  # where a state was last asked for
    asked_s: float = 0.0  # when that was, or the ranks began with it
    on_ranks: bool = False
    place_at: int = 0  # tokens that it had read when it got its place
    swapping_out: bool = False  # its state is on its way here, and it rests until that has come
    end_asked: bool = False  # the state at the end was asked for
    ranks_done: bool = False  # the ranks have no more to do: what is left is to hand states out
    saved: SavedState | None = None  # the state that work is done again from; None: the empty one
    saves: Saves = field(default_factory=Saves)
    arrival: Arrival | None = None
    offers: Offers = field(default_factory=Offers)

    def expect(self, num_bytes: int, max_bytes: int) -> Arrival:
        """Begin to receive the state that the request begins with."""
        self.arrival = Arrival(num_bytes, SnapshotParser(max_bytes=max_bytes))
        return self.arrival

    def keep(self, saved: SavedState) -> None:
        """Note the last saved state: it came to begin with, or a rank has saved it."""
        self.arrival, self.saved = None, saved

    def open(self, tokens: int, now: float) -> None:
        """Note that the ranks, or the one that draws for it, begin with the request."""
        self.on_ranks, self.place_at, self.asked_s = True, tokens, now

    def close(self) -> bool:
        """Note that the ranks forget the request; true if they had it."""
        had, self.on_ranks = self.on_ranks, False
        return had

    def ask(self, here: tuple[int, int], now: float, *, at_end: bool = False) -> int:
        """Ask for the state; returns its number. `at_end`: it is the last one."""
        self.asked_at, self.asked_s, self.end_asked = here, now, at_end
        return self.saves.ask()

    def swap_out(self, here: tuple[int, int], now: float) -> int:
        """Give the request's place to another until its state has come here; returns the number of that state."""
        self.on_ranks, self.swapping_out, self.queued_at, self.asked_at = False, True, now, here
        return self.saves.ask()

    def swapped_out(self) -> None:
        """Note that the state is here: the request waits for a place like a new one."""
        self.swapping_out = False

    def finish(self) -> bool:
        """Note that the ranks have no more to do; true if they must be told to forget the request."""
        self.ranks_done = True
        return self.close()

    def ask_no_more(self) -> None:
        """Hand out no further states."""
        self.states_at = ()

    def rewind(self, here: tuple[int, int]) -> None:
        """Go back to the last saved state, after `here` tokens read and drawn."""
        self.asked_at = here
        self.saves.clear()
        self.on_ranks = self.swapping_out = self.end_asked = False
