"""The rules by which a request is sent again, and after how long: decisions without a clock of their own."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from dist_attn_api.errors import ClientError, Code
from dist_attn_client.errors import BrokenOff, Busy, OutOfTime, Overloaded, Refused, Unreachable

_PASSING = {Code.ENGINE_FAILED, Code.ENGINE_TIMEOUT, Code.INTERNAL_ERROR}


@dataclass(frozen=True)
class Retry:
    """The patience of a client. Units: seconds.

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
    """The tries of one piece of work: the failures since it last progressed, and the time until which it is wanted."""

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
        """Note that something new came: failures before it no longer count."""
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
        """The seconds to wait before a request is sent again; `repeatable` says that doing it twice does no harm.

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
        """Return whether a session is still busy within the time by which its writer will have ended; count the look.

        `Retry-After` is an upper bound, by which a writer that died is given up; one that lives ends much sooner.
        """
        if not isinstance(error, Busy) or asked is None:
            return False
        if self._free_by is None:
            self._free_by = self._now() + asked
        self._looks += 1
        return self._now() < self._free_by


def _may_repeat(error: ClientError, repeatable: bool) -> bool:
    """Return whether sending a request again can help and does no harm.

    A request that never reached the service, or was refused before it was begun, may always be sent again; one that
    may have been done, only if it is repeatable: a POST without an idempotency key is not.
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
