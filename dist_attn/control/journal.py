"""What the ranks were given since a state was saved: with it and that state, their work can be done again."""

from collections import Counter, deque
from dataclasses import dataclass, field
from itertools import takewhile

from dist_attn.control.token_queue import TokenQueue

__all__ = ["Journal"]


@dataclass
class Journal:
    """The saved state stands after `position` tokens of the input and `draws` drawn tokens; 0 and 0 is the empty state.

    `unfed` drawn tokens are not in it: the last one, where each is fed by the next draw.

    Memory: 4 bytes per token of the input since then, what was drawn since then, and a count of each token of the
    vocabulary that was drawn before.
    """

    position: int = 0
    draws: int = 0
    unfed: int = 1
    given: TokenQueue = field(default_factory=TokenQueue)
    edges: deque[int] = field(default_factory=deque)
    """Where the blocks since `position` ended."""
    counts: Counter[int] = field(default_factory=Counter)
    """How often each token was drawn that was fed to the saved state; penalties need it."""
    _drawn: deque[int] = field(default_factory=deque)
    _first_drawn: int = 0  # which draw the first of them was

    def give(self, tokens: bytes) -> None:
        """The next tokens of the input go to the ranks."""
        self.given.push(tokens)

    def cut(self, edge: int) -> None:
        """A block ends here, if not for the first time."""
        if not self.edges or edge > self.edges[-1]:
            self.edges.append(edge)

    def due(self, start: int) -> tuple[int, ...]:
        """Where the blocks from `start` on ended when they were given before; nothing for those that are new."""
        return tuple(self.edges) if self.edges and start < self.edges[-1] else ()

    def draw(self, token: int) -> None:
        """The next token was drawn and sent on."""
        self._drawn.append(token)

    def drawn(self, index: int) -> int | None:
        """The token of that draw; None if it is not known (yet)."""
        at = index - self._first_drawn
        return self._drawn[at] if 0 <= at < len(self._drawn) else None

    def forget_draws(self, after: int) -> None:
        """The tokens of later draws than these do not count."""
        while self._first_drawn + len(self._drawn) > max(after, self._first_drawn):
            self._drawn.pop()

    def advance(self, position: int, draws: int) -> None:
        """A later state was saved: what came before it will not be needed again."""
        self.given.drop(position - self.position)
        for _ in takewhile(lambda edge: edge <= position, tuple(self.edges)):
            self.edges.popleft()
        while self._first_drawn < draws - self.unfed and self._drawn:
            self.counts[self._drawn.popleft()] += 1
            self._first_drawn += 1
        self.position, self.draws = position, draws
