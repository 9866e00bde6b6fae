"""How urgent a request is and until when it is of use: read from its headers or its body, told to the engine."""

import math
import time
from dataclasses import dataclass
from typing import Protocol

from starlette.requests import Request

from dist_attn.wire.terms import PRIORITIES, Terms
from dist_attn_service.base.errors import BadRequest, Code, ServiceError

__all__ = ["DeadlineExceeded", "RequestTerms", "WithTerms", "terms_of"]

PRIORITY_HEADER, DEADLINE_HEADER = "x-request-priority", "x-request-deadline"
NORMAL = PRIORITIES.index("normal")
MOST_SECONDS = 30 * 86_400.0


class DeadlineExceeded(ServiceError):
    """The request's own deadline has passed; to send it again as it is would be of no use."""

    default_code = Code.DEADLINE_EXCEEDED

    def __init__(self, message: str) -> None:
        super().__init__(message, headers={"x-should-retry": "false"})


class WithTerms(Protocol):
    """A body that may say the same as the headers, and then counts."""

    @property
    def priority(self) -> str | None: ...

    @property
    def deadline_seconds(self) -> float | None: ...


@dataclass(frozen=True)
class RequestTerms:
    """`deadline_at` is in seconds of the monotonic clock, None for none; with `progress` the client is told how far."""

    priority: int = NORMAL
    deadline_at: float | None = None
    progress: bool = False

    @classmethod
    def of_body(cls, body: WithTerms) -> "RequestTerms":
        """What the body alone says; the deadline counts from now."""
        limit = None if body.deadline_seconds is None else time.monotonic() + body.deadline_seconds
        return cls(PRIORITIES.index(body.priority or "normal"), limit, _wants_progress(body))

    def for_engine(self, tokens: int | None = None) -> Terms:
        """What the engine is told of a part of the request that has so many tokens.

        Raises: DeadlineExceeded when it is too late for that.
        """
        left = None if self.deadline_at is None else self.deadline_at - time.monotonic()
        if left is not None and left <= 0:
            raise DeadlineExceeded("the request's deadline passed before the engine could begin with it")
        return Terms(self.priority, left, tokens, self.progress)


def terms_of(request: Request, body: WithTerms | None = None) -> RequestTerms:
    """The terms of a request; its deadline counts from now.

    Raises: BadRequest for a class or a number of seconds that there is not, ServiceError (403) for `high` of a caller
        that may not ask for it.
    """
    priority = (body and body.priority) or request.headers.get(PRIORITY_HEADER, "normal").strip().lower()
    if priority not in PRIORITIES:
        raise BadRequest(f"{PRIORITY_HEADER} is {priority[:40]!r}; send one of {', '.join(PRIORITIES)}")
    if priority == "high" and not request.state.record.may_hurry:
        raise ServiceError(
            "the priority high asks for an admin key, and this key is none; leave it out",
            code=Code.ADMIN_KEY_NEEDED,
            param="priority",
        )
    seconds = None if body is None else body.deadline_seconds
    if seconds is None and DEADLINE_HEADER in request.headers:
        seconds = _seconds(request.headers[DEADLINE_HEADER])
    deadline_at = None if seconds is None else time.monotonic() + seconds
    return RequestTerms(PRIORITIES.index(priority), deadline_at, _wants_progress(body))


def _wants_progress(body: WithTerms | None) -> bool:
    """Whether events shall say how far the prompt is read; not all bodies can ask for that."""
    return bool(getattr(body, "return_progress", None))


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= MOST_SECONDS:
        raise BadRequest(
            f"{DEADLINE_HEADER} is {text[:40]!r}; send the seconds from now after which the answer is of no use, up "
            f"to {MOST_SECONDS:g}"
        )
    return seconds
