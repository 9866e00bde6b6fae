"""The draws of one request: tokens asked of the ranks, answered, and sent to the client, and the end of drawing."""

from array import array
from collections import Counter, deque
from dataclasses import dataclass, field
from functools import partial

from dist_attn.wire.messages import SamplingSpec


@dataclass
class Drawing:
    """Draws of one request. `saved` <= `back` <= `asked`, and `back` < `sent` only while draws are made a second time.

    Memory: the tokens drawn since the last saved state, with a grammar all, and a count of each token drawn before.
    """

    spec: SamplingSpec | None = None
    unfed: int = 0  # drawn tokens that are not in a saved state: 1 where each is fed by the next draw
    asked: int = 0
    back: int = 0  # that came back from the ranks
    sent: int = 0
    limit: int | None = None  # where drawing ends before `max_tokens`
    owner: int | None = None  # the rank that draws
    logits_rank: int | None = None  # that has the logits after the last token that was read; None: all, or none
    rewinding: bool = False  # too much was drawn: once the ranks owe nothing more, it goes back
    saved: int = 0  # draws of the last saved state
    counts: Counter[int] = field(default_factory=Counter)
    """The times that each token was drawn, up to the saved state; penalties need them."""
    fed: "array[int]" = field(default_factory=partial(array, "i"))
    """These tokens in order, of a text that follows a grammar."""
    _drawn: deque[int] = field(default_factory=deque)
    _first_drawn: int = 0  # which draw the first of them was

    @property
    def most(self) -> int:
        """The most tokens that will be drawn, as far as is known now."""
        most = 0 if self.spec is None else self.spec.max_tokens
        return most if self.limit is None else min(most, self.limit)

    @property
    def may_ask(self) -> bool:
        """Return whether more tokens may be asked of the ranks."""
        return self.asked < self.most and not self.rewinding

    @property
    def complete(self) -> bool:
        """Return whether every token has been sent."""
        return self.sent >= self.most

    def ask(self, rank: int) -> int:
        """Ask a rank for the next token; returns the draw whose token goes along, -1 for the prompt's last token.

        With `unfed` 1 that is the draw before, which this one feeds; with 0 it is this draw, whose token is known only
        where it is made a second time.
        """
        self.owner = rank
        self.asked += 1
        return self.asked - 1 - self.unfed

    def logits_are_at(self, rank: int) -> None:
        """Note the rank that has read the last token of a block, and so has the logits."""
        self.logits_rank = rank

    def drawn(self, index: int) -> int | None:
        """Return the token of draw `index`; None if it is not known (yet)."""
        at = index - self._first_drawn
        return self._drawn[at] if 0 <= at < len(self._drawn) else None

    # ---- what comes back -----------------------------------------------------------------------

    def take_back(self) -> bool:
        """Count a token that has come back; true if it was sent before, and is drawn for the second time."""
        self.back += 1
        return self.back <= self.sent

    def send(self, token: int) -> str | None:
        """Count a token that goes to the client; returns why drawing ends with it, None if it goes on."""
        assert self.spec is not None
        self.sent += 1
        self._drawn.append(token)
        if not self.complete:
            return None
        return "length" if self.sent >= self.spec.max_tokens else "stop"

    def end(self) -> None:
        """End drawing at the end token: nothing that was asked for beyond it counts."""
        self.limit = self.sent if self.limit is None else min(self.limit, self.sent)
        self.back = self.asked

    @property
    def owed(self) -> bool:
        """Return whether the ranks still owe tokens that were asked of them."""
        return self.back < self.asked

    # ---- states --------------------------------------------------------------------------------

    def finish_after(self, drawn: int) -> bool:
        """Let no more than the first `drawn` tokens count; false where that changes nothing.

        What is in the saved state counts in any case. `rewinding` says whether more was asked of the ranks.
        """
        drawn = max(drawn, self.saved)
        if self.spec is None or drawn >= self.most:
            return False
        self.limit = drawn
        # While draws are made a second time, more may have been sent than are asked for now.
        self.sent = min(self.sent, drawn)
        while self._first_drawn + len(self._drawn) > max(drawn, self._first_drawn):
            self._drawn.pop()
        self.rewinding = self.asked > drawn
        return True

    def commit(self, draws: int) -> None:
        """Note that a state was saved after `draws` draws."""
        while self._first_drawn < draws - self.unfed and self._drawn:
            token = self._drawn.popleft()
            self.counts[token] += 1
            if self.spec is not None and self.spec.grammar:
                self.fed.append(token)
            self._first_drawn += 1
        self.saved = draws

    def rewind(self) -> int:
        """Go back to the last saved state; returns how many draws will be made again."""
        again = self.back - self.saved
        self.asked = self.back = self.saved
        self.owner = self.logits_rank = None
        self.rewinding = False
        return again
