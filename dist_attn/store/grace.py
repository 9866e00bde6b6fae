"""When expired entries may be deleted, although the wall clock that calls them expired may be wrong."""

import math
import time
from collections.abc import Callable
from typing import final

JUMP_S = 5.0  # the wall clock is corrected by less between two looks, unless it is set


@final
class ExpiryGrace:
    """Deletion waits until the wall clock has run evenly for a time of the monotonic clock, of `grace_s` at most.

    Entries expire by the wall clock, as they outlive processes. A clock that is set wrong, or a machine that wakes up
    with a wrong one, would end all of them at once. So what has expired is hidden at once, and deleted only after it
    has stayed expired for that time; a jump of the wall clock against the monotonic one starts it anew, and so does a
    restart. Meanwhile the clock can be corrected, and what was hidden is there again.

    One object serves one kind of upkeep, for as long as that runs.
    """

    def __init__(
        self,
        grace_s: float,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._grace_s = grace_s
        self._clock = clock
        self._monotonic = monotonic
        self._since = monotonic()
        self._offset = clock() - self._since
        self._jumped_s = 0.0

    def deletable_until(self, life_s: float = math.inf) -> float:
        """What expired at this time or before may be deleted now, in seconds since 1970; minus infinity: nothing.

        `life_s` is the life of the entry that is asked for: once so much time has passed it has expired by any clock,
        so its grace is no longer than that.
        """
        now, wall = self._monotonic(), self._clock()
        jump = wall - now - self._offset
        self._offset = wall - now
        if abs(jump) > JUMP_S:
            self._since = now
            self._jumped_s += jump
            return -math.inf
        grace_s = min(self._grace_s, life_s)
        return wall - grace_s if now - self._since >= grace_s else -math.inf

    def take_jump(self) -> float:
        """By how many seconds the wall clock has jumped since this was asked last, 0 if it has not; for the log."""
        jumped, self._jumped_s = self._jumped_s, 0.0
        return jumped
