"""When a request is sent again, and after how long: the service's rules, as decisions without a clock of their own."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from dist_attn_api.errors import ClientError, Code
from dist_attn_client.errors import BrokenOff, Busy, OutOfTime, Overloaded, Refused, Unreachable

_PASSING = {Code.ENGINE_FAILED, Code.ENGINE_TIMEOUT, Code.INTERNAL_ERROR}


@dataclass(frozen=True)
class Retry:
    """How patient a client is. Units: seconds.

    A request is sent up to `tries` times without any progress; between two of them the client waits `first_s`, then
    twice as long each time, up to `longest_s`, less a random part of up to half. A `Retry-After` of the service takes
    precedence up to `longest_asked_s`; where it asks for more, the error is raised. A busy session is asked again at
    the client's own pace, and these tries do not count until the time that `Retry-After` names.
    """

    tries: int = 6
    first_s: float = 0.5
    longest_s: float = 20.0
    longest_asked_s: float = 120.0


DEFAULT_RETRY = Retry()


@final
class Attempts:
    """One piece of work: how often it has failed since it last moved, and until when it is wanted."""

    def __init__(
        self,
        retry: Retry,
        now: Callable[[], float],
        deadline_s: float | None = None,
        part: Callable[[], float] = random.random,
    ) -> None:
        self._retry, self._now, self._part = retry, now, part
        self._deadline_s = deadline_s
        self._until = None if deadline_s is None else now() + deadline_s
        self.failed = 0
        self._free_by: float | None = None
        self._looks = 0  # at a session that is busy

    def progressed(self) -> None:
        """Something new came: failures before it do not count any more."""
        self.failed = self._looks = 0
        self._free_by = None

    def left_s(self) -> float | None:
        """Seconds until the deadline, None without one.

        Raises: OutOfTime when it has passed.
        """
        if self._until is None:
            return None
        left = self._until - self._now()
        if left <= 0:
            raise OutOfTime(
                f"not done within the {self._deadline_s:g} s that it was given; give more, or hand it in as a job"
            )
        return left

    def wait_after(self, error: ClientError, *, repeatable: bool) -> float:
        """Seconds to wait before it is sent again; `repeatable` says that doing it twice does no harm.

        Raises: `error` itself when it is not to be sent again, OutOfTime when that would be too late.
        """
        asked = error.retry_after_s if isinstance(error, Refused) else None
        if not self._polls(error, asked):
            self.failed += 1
        if self.failed >= self._retry.tries or not _may_repeat(error, repeatable):
            raise error
        if asked is not None and asked > self._retry.longest_asked_s:
            raise error
        longest = min(self._retry.longest_s, self._retry.first_s * 2.0 ** max(0, self.failed + self._looks - 1))
        wait = longest * (1 - self._part() / 2)
        if asked is not None:
            wait = min(asked, wait) if isinstance(error, Busy) else asked
        left = self.left_s()
        if left is not None and wait >= left:
            raise OutOfTime(f"the {self._deadline_s:g} s that it was given do not reach: {error}") from error
        return wait

    def _polls(self, error: ClientError, asked: float | None) -> bool:
        """Whether a session is only busy for the time in which its writer will have ended, as often as that is seen.

        `Retry-After` is an upper bound then, by which a writer that died is given up; one that lives ends much sooner.
        """
        if not isinstance(error, Busy) or asked is None:
            return False
        if self._free_by is None:
            self._free_by = self._now() + asked
        self._looks += 1
        return self._now() < self._free_by


def _may_repeat(error: ClientError, repeatable: bool) -> bool:
    """Whether sending it again can help and does no harm.

    What never reached the service, or was refused before it was begun, may always be sent again; where nobody knows
    whether it was done, only what is repeatable: POST without a key that makes it so is not.
    """
    match error:
        case Unreachable():
            return True
        case BrokenOff():
            return repeatable
        case Refused(should_retry=False):
            return False
        case Overloaded() | Busy():
            return True
        case Refused(status=408 | 502 | 504):
            return repeatable
        case Refused(code=code):
            return repeatable and code in _PASSING
    return False
