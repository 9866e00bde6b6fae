"""The tokens sent for a request and the results that came, so that another controller can do the work again."""

from array import array
from collections import deque
from collections.abc import Callable
from typing import final

import msgspec

from dist_attn.wire.messages import Checkpoint, Done, Generated, Progress, Restored, Rows
from dist_attn_service.base.errors import Code, EngineFailure, ServiceError

EngineEvent = Restored | Rows | Generated | Progress | Checkpoint | Done
TOKEN_BYTES = 4
MOST_STATES = 2  # that wait to be recorded; with more of them no further tokens are sent


class GivenMemory:
    """The memory that the tokens of all open requests may take together. Units: bytes.

    When it is full the request that has most forgets its tokens: a long text must not cost many short ones. With
    several engines tokens of sessions are kept too: another one goes on from the same stored state.
    """

    def __init__(self, limit: int, *, several: bool = False) -> None:
        self.several = several
        self._left = limit
        self._holders: set[GivenTokens] = set()

    def take(self, holder: "GivenTokens", count: int) -> bool:
        """Take `count` more bytes for this holder, and return whether there was room for them."""
        while count > self._left:
            largest = max(self._holders, key=len, default=holder)
            if len(largest) <= len(holder):
                return False
            largest.let_go()
        self._left -= count
        self._holders.add(holder)
        return True

    def give_back(self, holder: "GivenTokens", count: int) -> None:
        """Free bytes of a holder, which has forgotten them."""
        self._left += count
        if not len(holder):
            self._holders.discard(holder)


class GivenTokens:
    """The tokens that were sent for one request, little-endian int32, as long as there is memory for all of them."""

    def __init__(self, memory: GivenMemory) -> None:
        self._memory = memory
        self._data = bytearray()
        self.whole = True

    def push(self, data: bytes) -> None:
        """Keep the next tokens."""
        if not self.whole:
            return
        if self._memory.take(self, len(data)):
            self._data += data
        else:
            self.let_go()

    def between(self, start: int, stop: int) -> bytes:
        """Tokens [start, stop)."""
        return bytes(self._data[TOKEN_BYTES * start : TOKEN_BYTES * stop])

    def __len__(self) -> int:
        return len(self._data) // TOKEN_BYTES

    def drop(self, count: int) -> None:
        """Forget the first `count` tokens: a stored state stands for them."""
        before = len(self._data)
        del self._data[: TOKEN_BYTES * count]
        self._memory.give_back(self, before - len(self._data))

    def let_go(self) -> None:
        """Forget all tokens; from now on the work cannot be done again."""
        self.drop(len(self))
        self.whole = False


Send = Callable[[int, bytes, bool], None]
"""Sends tokens: the position of the first, their bytes, and whether they are the last ones."""


@final
class SentTokens:
    """The tokens of one request from position `start` on: sent as far as there is credit, and again to another
    controller, if there is a `memory` for them.
    """

    def __init__(
        self, start: int, memory: GivenMemory | None, message_tokens: int, send: Send, kept_from: int = 0
    ) -> None:
        self._kept_from = kept_from  # the position at which another controller begins
        self.sent = start
        """The position after the last token sent."""
        self.final = False
        self.credit = self._most_credit = 0
        self.held = False
        """True while the tokens wait for another controller."""
        self._given = None if memory is None else GivenTokens(memory)
        self._message_tokens = message_tokens
        self._send = send
        self._again: int | None = None  # how many of the sent tokens the next controller has got

    @property
    def room(self) -> int:
        """The number of tokens that may still be sent."""
        return self.credit - self.sent

    @property
    def done(self) -> int:
        """A number that grows whenever an engine takes tokens, or stores a state, that none had before."""
        return self._most_credit + self._kept_from

    @property
    def whole(self) -> bool:
        """Return whether all sent tokens are kept, from where another controller begins."""
        return self._given is not None and self._given.whole and len(self._given) == self.sent - self._kept_from

    def begin_at(self, position: int) -> None:
        """Forget the tokens before `position`: another controller would begin with a state that stands there."""
        if self._given is not None:
            self._given.drop(position - self._kept_from)
            self._given.whole |= position == self.sent  # nothing of it is missing any more
        self._kept_from = position

    def remember(self, data: bytes) -> None:
        """Keep the next tokens, which another controller will need."""
        if self._given is not None:
            self._given.push(data)

    def forget(self) -> None:
        """Forget the tokens: they will not be sent again."""
        if self._given is not None:
            self._given.let_go()

    def push(self, data: bytes, *, final: bool) -> None:
        """Send the next tokens, for which there is room; `final` marks the end."""
        self.remember(data)
        if not (self.held or self._again is not None):  # otherwise `send_again` sends them
            self._send(self.sent, data, final)
        self.sent += len(data) // TOKEN_BYTES
        self.final = self.final or final

    def grant(self, upto: int) -> None:
        """Take credit up to this position, and send again what it allows.

        Raises: EngineFailure as `send_again`.
        """
        self.credit, self._most_credit = upto, max(upto, self._most_credit)
        self.send_again()

    def hold(self) -> None:
        """Wait for another controller."""
        self.held, self.credit = True, 0

    def begin_again(self) -> None:
        """Begin again with another controller.

        Raises: EngineFailure when there was no memory for the tokens.
        """
        self.held, self.credit = False, 0
        self._require_whole()
        self._again = self._kept_from if self.sent > self._kept_from or self.final else None

    def send_again(self) -> None:
        """Send as many of the tokens that were sent before as there is credit for.

        Raises: EngineFailure when there was no memory for the tokens.
        """
        while self._again is not None:
            given, at = self._require_whole(), self._again
            stop = min(self.sent, self.credit, at + self._message_tokens)
            if stop <= at < self.sent:
                return
            last = stop == self.sent
            self._send(at, given.between(at - self._kept_from, stop - self._kept_from), last and self.final)
            self._again = None if last else stop

    def _require_whole(self) -> GivenTokens:
        if self._given is None or not self._given.whole:
            self._again = None
            words = "the engine's controller was started again, and there was no memory to keep this input; "
            raise EngineFailure(words + "send it again", code=Code.ENGINE_UNREACHABLE)
        return self._given


class Inbox:
    """The results of a request that have not been taken yet; those that come a second time are not handed on again.

    Rows are the same bits when they are made again, and tokens are drawn from the same random numbers.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._events: deque[EngineEvent] = deque()
        self.bytes = 0
        """The bytes of the rows that wait."""
        self._states = 0
        self._rows = 0  # handed on
        self._rows_come = 0  # from the engine that works on the request now
        self._drawn = array("i")
        self._drawn_come = 0

    def __len__(self) -> int:
        return len(self._events)

    @property
    def come(self) -> int:
        """The number of rows and drawn tokens that have come, each counted once."""
        return self._rows + len(self._drawn)

    def has_room(self, soft_bytes: int) -> bool:
        """Return whether more work may be asked for: few bytes of rows, and few stored states, have not been taken."""
        return self.bytes < soft_bytes and self._states <= MOST_STATES

    def take(self) -> EngineEvent:
        """The oldest event."""
        event = self._events.popleft()
        self._states -= isinstance(event, Checkpoint)
        if isinstance(event, Rows):
            self.bytes -= len(event.vectors)
        return event

    def clear(self) -> list[Checkpoint]:
        """Drop all events that were not taken; return the stored states among them."""
        states = [event for event in self._events if isinstance(event, Checkpoint)]
        self._events.clear()
        self.bytes = self._states = 0
        return states

    def begin_again(self) -> None:
        """Expect the results from the first one on: another engine does the work from its beginning."""
        self._rows_come = self._drawn_come = 0

    def put(self, event: EngineEvent) -> None:
        """Add the next event.

        Raises: EngineFailure for rows and tokens that do not follow the ones before; ServiceError for more rows than
            there is memory for.
        """
        if isinstance(event, Progress) and self._events and isinstance(self._events[-1], Progress):
            self._events.pop()  # of several that were not taken yet only the last one counts
        new: EngineEvent | None = event
        if isinstance(event, Generated):
            new = self._new_tokens(event)
        elif isinstance(event, Rows):
            new = self._new_rows(event)
        if isinstance(new, Rows):
            self._hold(len(new.vectors))
        if new is not None:
            self._states += isinstance(new, Checkpoint)
            self._events.append(new)

    def _hold(self, count: int) -> None:
        if self.bytes + count > self._limit:
            raise ServiceError(
                f"more than {self._limit} bytes of rows wait in memory; ask for fewer rows at once (a larger window) "
                "or a smaller document",
                code=Code.OVERLOADED,
                status=500,
            )
        self.bytes += count

    def _new_rows(self, rows: Rows) -> Rows | None:
        """The rows that had not come before; None where all had.

        Raises: EngineFailure for rows that do not follow the ones before.
        """
        if rows.first_row != self._rows_come:
            raise EngineFailure(f"rows from {rows.first_row} arrived where row {self._rows_come} was due")
        count = len(rows.starts)
        again = min(count, self._rows - self._rows_come)
        self._rows_come += count
        self._rows = max(self._rows, self._rows_come)
        if not again:
            return rows
        if again == count:
            return None
        width = len(rows.vectors) // count
        return msgspec.structs.replace(
            rows,
            first_row=rows.first_row + again,
            starts=rows.starts[again:],
            stops=rows.stops[again:],
            vectors=rows.vectors[again * width :],
        )

    def _new_tokens(self, generated: Generated) -> Generated | None:
        """The tokens that were not drawn before, None where all were; the end of drawing is always new.

        Raises: EngineFailure where other tokens were drawn than the first time.
        """
        tokens = generated.tokens
        again = min(len(tokens), len(self._drawn) - self._drawn_come)
        if tokens[:again] != self._drawn[self._drawn_come : self._drawn_come + again].tolist():
            raise EngineFailure("the engine drew other tokens when it did the work again; send the request again")
        self._drawn_come += len(tokens)
        self._drawn.extend(tokens[again:])
        if not again:
            return generated
        if again == len(tokens) and generated.finish_reason is None:
            return None
        logprobs = generated.logprobs
        return msgspec.structs.replace(
            generated, tokens=tokens[again:], logprobs=None if logprobs is None else logprobs[again:] or None
        )
