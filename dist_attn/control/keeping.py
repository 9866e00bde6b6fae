"""Where the state of one request is: on the ranks, on its way here, in the controller's files, on its way out."""

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
    """Of the last one that was asked for; they begin at 1."""
    _asked: deque[int] = field(default_factory=deque)
    _came: dict[int, SavedState] = field(default_factory=dict)

    def ask(self) -> int:
        """Another one is asked for; its number."""
        self.ordinal += 1
        self._asked.append(self.ordinal)
        return self.ordinal

    def awaits(self, ordinal: int) -> bool:
        """Whether it was asked for and has not come; after a loss nothing is awaited."""
        return ordinal in self._asked and ordinal not in self._came

    def take(self, saved: SavedState) -> None:
        """It has come."""
        self._came[saved.ordinal] = saved

    def give_up(self, ordinal: int) -> None:
        """It could not be kept."""
        self._asked.remove(ordinal)

    @property
    def first(self) -> SavedState | None:
        """The next one that counts, if it has come."""
        return self._came.get(self._asked[0]) if self._asked else None

    def pop(self) -> None:
        """The first one counts now, or never will."""
        del self._came[self._asked.popleft()]

    @property
    def pending(self) -> bool:
        """Whether any that was asked for does not count yet."""
        return bool(self._asked)

    def clear(self) -> None:
        """The ranks are lost."""
        self._asked.clear()
        self._came.clear()


@dataclass
class Arrival:
    """The state that a request begins with, as far as it has come."""

    num_bytes: int
    parser: SnapshotParser
    credit: int = 0
    received: int = 0

    def due(self, piece: StatePiece) -> bool:
        """Whether the piece follows what has come, as far as credit was given."""
        return piece.start == self.received and piece.start + len(piece.data) <= self.credit

    def feed(self, piece: StatePiece) -> None:
        """Take the piece.

        Raises: WireError, StateMismatchError for bytes of something else than a snapshot.
        """
        self.parser.feed(piece.data)
        self.received += len(piece.data)

    def grant(self) -> int | None:
        """Up to where its bytes may come now, where that is worth a message."""
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
        """Another one waits; whether it is the first, and must be announced."""
        self.position = saved.position
        self.waiting.append(saved)
        return len(self.waiting) == 1

    def announce(self, now: float) -> SavedState:
        """The first one is announced."""
        self.since, self.credit, self.sent = now, 0, 0
        return self.waiting[0]

    def grant(self, position: int, upto: int, now: float) -> SavedState | None:
        """The reader takes more of the first one; None if that stands at another position."""
        if not self.waiting or self.waiting[0].position != position:
            return None
        self.since = now
        self.credit = min(max(self.credit, upto), self.waiting[0].num_bytes)
        return self.waiting[0]

    def advance(self, count: int) -> None:
        """So many bytes of the first one were sent."""
        self.sent += count

    def pop(self) -> None:
        """The first one has been fetched, or is given up."""
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
        """The state to begin with may come."""
        self.arrival = Arrival(num_bytes, SnapshotParser(max_bytes=max_bytes))
        return self.arrival

    def keep(self, saved: SavedState) -> None:
        """This state is the last saved one: it came to begin with, or a rank has saved it."""
        self.arrival, self.saved = None, saved

    def open(self, tokens: int, now: float) -> None:
        """The ranks begin with the request, or the one that draws for it."""
        self.on_ranks, self.place_at, self.asked_s = True, tokens, now

    def close(self) -> bool:
        """The ranks forget it; whether they had it."""
        had, self.on_ranks = self.on_ranks, False
        return had

    def ask(self, here: tuple[int, int], now: float, *, at_end: bool = False) -> int:
        """Ask for the state; its number. `at_end`: it is the last one."""
        self.asked_at, self.asked_s, self.end_asked = here, now, at_end
        return self.saves.ask()

    def swap_out(self, here: tuple[int, int], now: float) -> int:
        """Its place goes to another: it rests until its state is here; the number of that state."""
        self.on_ranks, self.swapping_out, self.queued_at, self.asked_at = False, True, now, here
        return self.saves.ask()

    def swapped_out(self) -> None:
        """Its state is here: it waits for a place like one that has just come."""
        self.swapping_out = False

    def finish(self) -> bool:
        """The ranks have no more to do; whether they must be told to forget it."""
        self.ranks_done = True
        return self.close()

    def ask_no_more(self) -> None:
        """No further states are handed out."""
        self.states_at = ()

    def rewind(self, here: tuple[int, int]) -> None:
        """Go back to the last saved state, which stands here."""
        self.asked_at = here
        self.saves.clear()
        self.on_ranks = self.swapping_out = self.end_asked = False
