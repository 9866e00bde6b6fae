"""What a request knows of states: the one to begin with, those that ranks save, those that are handed out."""

from collections import deque
from dataclasses import dataclass, field

from dist_attn.wire.rank_messages import SavedState
from dist_attn.wire.snapshot import SnapshotParser

__all__ = ["Arrival", "Offer", "Offers", "Saves"]


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
    """The state that a session begins with, as far as it has come."""

    parser: SnapshotParser
    credit: int = 0
    received: int = 0


@dataclass
class Offer:
    saved: SavedState
    credit: int = 0
    sent: int = 0


@dataclass
class Offers:
    """States that wait to be fetched, in order; the first one has been announced."""

    waiting: deque[Offer] = field(default_factory=deque)
    position: int = -1  # of the newest: what is saved again after a loss is not offered again
    since: float = 0.0  # when the reader last took something, or had nothing to take
