"""Limits on the requests that are under way at once, and on the memory of their JSON bodies."""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dist_attn_service.base.errors import MOST_RETRY_SECONDS, Code, ServiceError, retry_after

__all__ = ["BodyMemory", "RequestLimit", "Turnover"]

LATELY = 64  # requests that have ended, by which the next ones are judged
GUESS_SECONDS = 5.0  # that a request takes, before any has ended


class Turnover:
    """A guess of when a held place comes free: by how long places were held lately, and have been held by now.

    Callers that are told to come back form a line: each is told a later time, so that they do not all come at once.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lately: deque[float] = deque(maxlen=LATELY)
        self._held: dict[int, float] = {}
        self._number = 0
        self._line: dict[str, float] = {}  # the time until which the places that come free are promised

    def begin(self) -> Callable[[], None]:
        """Note that a place is held; return the function that frees it."""
        self._number += 1
        number = self._number
        self._held[number] = self._clock()
        return lambda: self._lately.append(self._clock() - self._held.pop(number))

    def refusal(self, message: str, caller: str = "", own: int = 0) -> ServiceError:
        """The 429 for a request that waits for any held place, or with `caller` for one of the `own` of that caller."""
        now = self._clock()
        usual = sum(self._lately) / len(self._lately) if self._lately else GUESS_SECONDS
        # The best guess: a place that has been held for some time is held for as long again.
        age = now - sum(self._held.values()) / max(1, len(self._held))
        self._line = {name: until for name, until in self._line.items() if until > now}
        until = self._line.get(caller, now) + max(usual, 2 * age) / max(1, own or len(self._held))
        self._line[caller] = min(until, now + MOST_RETRY_SECONDS)
        return ServiceError(message, code=Code.OVERLOADED, headers=retry_after(until - now))


class RequestLimit:
    """The count of requests that hold engine work or spools; over the limit the next one is told to come back.

    A caller may hold half of the places that others leave, so that no caller, and no few of them, can take all.
    """

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._of_callers: Counter[str] = Counter()
        self._turnover = Turnover(clock)
        self.count = 0
        self.stopping = False
        """True once the service only ends the requests that are under way."""
        self._none = asyncio.Event()
        self._none.set()

    @contextmanager
    def one(self, caller: str) -> Iterator[None]:
        """Hold one place.

        Raises: ServiceError (429) when all are taken or the caller holds its share.
        """
        own = self._of_callers[caller]
        left = self._limit - (self.count - own)
        if not left:
            words = f"{self._limit} requests are under way, which is this service's limit; try again in a moment"
            raise self._turnover.refusal(words)
        if own >= (left + 1) // 2:
            words = (
                f"{own} requests of this caller are under way, and others leave {left} of {self._limit} places, of "
                "which a caller may hold half; try again when one of yours has ended"
            )
            raise self._turnover.refusal(words, caller, own)
        self.count += 1
        self._of_callers[caller] += 1
        self._none.clear()
        free = self._turnover.begin()
        try:
            yield
        finally:
            free()
            self.count -= 1
            self._of_callers[caller] -= 1
            self._of_callers += Counter()  # forgets those who hold none
            if not self.count:
                self._none.set()

    async def drained(self, within_seconds: float) -> bool:
        """Wait until no request is under way; false when that took too long."""
        try:
            async with asyncio.timeout(within_seconds):
                await self._none.wait()
        except TimeoutError:
            return False
        return True


class BodyMemory:
    """The bytes of JSON bodies, or of `what` else, that requests under way hold together; a request that would go over
    the limit is told to come back, or to do what `instead` says.

    Several bodies of one caller may hold half of what others leave. Units: bytes as they arrive; parsed, a body takes
    several times as much.
    """

    def __init__(
        self,
        limit: int,
        what: str = "JSON bodies",
        instead: str = "send a long text as text/plain to /v1/encodings",
    ) -> None:
        self._limit = limit
        self._what, self._instead = what, instead
        self._of_callers: Counter[str] = Counter()
        self._turnover = Turnover()
        self.held = 0

    def hold(self, caller: str, at_end: Callable[[Callable[[], None]], None]) -> Callable[[int], None]:
        """Return a function that takes so many more bytes for one request; `at_end` gets the one that gives all back.

        Raises: ServiceError (429) from that function over the limit, unless no other request holds any.
        """
        mine = 0
        free = self._turnover.begin()

        def take(size: int) -> None:
            nonlocal mine
            own = self._of_callers[caller]
            share = self._limit - (self.held - own)
            if own > mine:
                share //= 2
            if self.held > mine and own + size > share:
                raise self._turnover.refusal(
                    f"{self._what} of requests under way hold {self.held} bytes, {own} of them for this caller, and "
                    f"the limit is {self._limit}, of which a caller may hold half of what others leave; try again in a "
                    f"moment, or {self._instead}"
                )
            mine += size
            self.held += size
            self._of_callers[caller] += size

        def give_back() -> None:
            free()
            self.held -= mine
            self._of_callers[caller] -= mine
            self._of_callers += Counter()  # forgets those who hold none

        at_end(give_back)
        return take
