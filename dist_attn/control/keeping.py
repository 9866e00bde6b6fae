"""The place of one request's state: on the ranks, on its way from the store, in a file of the controller, or stored."""

from collections import deque
from dataclasses import dataclass, field

from dist_attn.wire.rank_messages import SavedState


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
    fetching: bool = False  # the state to begin with is on its way from the store
    storing: deque[SavedState] = field(default_factory=deque)  # states to hand out; the first is being stored
    handed_out: int = -1  # position of the newest of all of these: one that is saved again after a loss does not count

    def fetch(self) -> None:
        """Note that the state to begin with is on its way."""
        self.fetching = True

    def keep(self, saved: SavedState) -> None:
        """Note the last saved state: it came to begin with, or a rank has saved it."""
        self.fetching, self.saved = False, saved

    def hand_out(self, saved: SavedState) -> bool:
        """Note a state that is to be stored; true if no other one is being stored now."""
        self.handed_out = saved.position
        self.storing.append(saved)
        return len(self.storing) == 1

    def stored(self) -> SavedState:
        """Take the state that has been stored, or could not be."""
        return self.storing.popleft()

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

    def hand_out_no_more(self) -> None:
        """Hand out no further states, and none of those that wait."""
        self.states_at = ()
        self.storing.clear()

    def rewind(self, here: tuple[int, int]) -> None:
        """Go back to the last saved state, after `here` tokens read and drawn."""
        self.asked_at = here
        self.saves.clear()
        self.on_ranks = self.swapping_out = self.end_asked = False
