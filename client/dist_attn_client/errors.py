"""The exceptions of calls to a service; each says what was given, what was needed and what to do.

ClientError (DistAttnError)       anything below; see dist_attn_api/errors.py
├── Unreachable                   no connection: nothing was sent
├── BrokenOff                     the answer did not come, or not to its end
├── OutOfTime                     the caller's deadline has passed
├── NotOurAnswer                  the answer is not one of a dist-attn service
└── Refused                       the service answered an error: status, code, param, facts, retry_after_s
    ├── Unusable (InputError)     400 and the like: what was sent cannot be used
    ├── KeyRefused (InputError)   401, 403
    ├── Missing (InputError)      404, 410: no such session, job, file, model, route
    ├── TooLarge (InputError)     413: over a limit that the message names
    ├── Conflict (InputError)     409, 412, 428: the session, job or file is not as the caller thinks
    ├── Busy                      409 with Retry-After: somebody else writes to the session
    ├── Overloaded                429, 503: not now; come back
    ├── QuotaUsed                 this caller's share is used up
    └── ServiceFailed             500 and above
"""

import json
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from dist_attn_api.errors import ClientError, Code, InputError

# What to do, where the service's own words cannot know it.
_ADVICE: dict[str, str] = {
    Code.INVALID_API_KEY: "give a key of this service: Client(url, key=…), or DIST_ATTN_API_KEY for the command line",
    Code.ADMIN_KEY_NEEDED: "this route needs an admin key",
    Code.INSUFFICIENT_QUOTA: "delete what is no longer needed, or ask the operator for more",
    Code.OVERLOADED: "come back later, or hand the work in as a job",
}


class Unreachable(ClientError):
    """No connection could be made, so nothing was sent."""


class BrokenOff(ClientError):
    """The request may have been taken, but its answer did not come, or not to its end."""


class OutOfTime(ClientError):
    """The deadline that the caller gave has passed."""


class NotOurAnswer(ClientError):
    """The answer is not one of a dist-attn service, or one of another version."""


@dataclass(eq=False)
class Refused(ClientError):
    """An error that the service answered.

    `status` is None for one that ended a stream, `facts` are the values beside the error in its body (`position`,
    `reached`), `should_retry` is what the service says of sending the same again, where it says anything.
    """

    message: str
    _: KW_ONLY
    status: int | None = None
    code: str = ""
    param: str | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    request_id: str = ""
    retry_after_s: float | None = None
    should_retry: bool | None = None

    def __post_init__(self) -> None:
        super().__init__(self.message)


class Unusable(Refused, InputError):
    """The service cannot use what was sent."""


class KeyRefused(Refused, InputError):
    """There was no key, or one that does not allow this request."""


class Missing(Refused, InputError):
    """There is nothing of that name, or nothing that belongs to this key."""


class TooLarge(Refused, InputError):
    """The request exceeds a limit that the message names."""


class Conflict(Refused, InputError):
    """The session, job or file is not as the request needs it; `position` is that of a session."""

    @property
    def position(self) -> int | None:
        """The position of the session, None where the conflict is about something else. Units: tokens."""
        position = self.facts.get("position")
        return position if isinstance(position, int) else None


class Busy(Refused):
    """Somebody else writes to the session; `retry_after_s` says by when that has ended."""


class Overloaded(Refused):
    """The service takes no more now, or its engine is not ready."""


class QuotaUsed(Refused):
    """This caller's share of the store or of files is used up."""


class ServiceFailed(Refused):
    """The service or its engine failed."""


_KIND_OF_CODE: dict[str, type[Refused]] = {Code.SESSION_BUSY: Busy, Code.INSUFFICIENT_QUOTA: QuotaUsed}
_KIND_OF_STATUS: dict[int, type[Refused]] = {
    401: KeyRefused, 403: KeyRefused, 404: Missing, 410: Missing, 409: Conflict, 412: Conflict, 428: Conflict,
    413: TooLarge, 429: Overloaded, 503: Overloaded, 500: ServiceFailed, 504: ServiceFailed, 507: ServiceFailed,
}  # fmt: skip


def error_of_answer(status: int, headers: Mapping[str, str], body: bytes, *, what: str) -> ClientError:
    """The exception for an answer of 300 and above; `what` is the request, as "POST /v1/jobs"."""
    try:
        document = json.loads(body)
        error = document["error"]
        words, code, param = str(error["message"]), str(error.get("code") or ""), error.get("param")
    except (ValueError, KeyError, TypeError, AttributeError):
        # An answer to HEAD has no body, and a proxy before the service has bodies of its own.
        ours = not body and headers.get("content-type") == "application/problem+json"
        if ours or status in (429, 502, 503, 504):
            return _kind("", status)(
                f"{what}: answered {status} without words", status=status, **_from_headers(headers)
            )
        return NotOurAnswer(
            f"{what}: answered {status} and {body[:80]!r}, which is no error of a dist-attn service; look at the URL"
        )
    kind = _kind(code, status)
    facts = {key: value for key, value in document.items() if key not in _OWN_MEMBERS}
    hints = _from_headers(headers)
    named = f" (request {hints['request_id']})" if hints["request_id"] and kind is ServiceFailed else ""
    message = f"{what}: {status} {code}: {words}{named}{_advice(code)}"
    return kind(message, status=status, code=code, param=param, facts=facts, **hints)


def error_of_words(document: Mapping[str, Any], *, what: str) -> Refused:
    """The exception for the error with which a stream ended."""
    error = document.get("error") or {}
    code, words = str(error.get("code") or ""), str(error.get("message") or "the stream ended with an error")
    facts = {key: value for key, value in document.items() if key not in _OWN_MEMBERS}
    kind = _kind(code, 500 if error.get("type") == "server_error" else 400)
    return kind(f"{what}: {code}: {words}{_advice(code)}", code=code, param=error.get("param"), facts=facts)


def _kind(code: str, status: int) -> type[Refused]:
    """The exception of the code, of its usual status, or of the answer's status: a newer service has more codes."""
    known = Code.of(code)
    usual = status if known is None else known.status
    kind = _KIND_OF_CODE.get(code) or _KIND_OF_STATUS.get(usual) or _KIND_OF_STATUS.get(status)
    return kind or (ServiceFailed if status >= 500 else Unusable)


_OWN_MEMBERS = {"type", "title", "status", "detail", "instance", "error", "object"}


def _from_headers(headers: Mapping[str, str]) -> dict[str, Any]:
    wait, again = headers.get("retry-after", ""), headers.get("x-should-retry")
    return {
        "request_id": headers.get("x-request-id", ""),
        "retry_after_s": float(wait) if wait.isdecimal() else None,
        "should_retry": None if again is None else again == "true",
    }


def _advice(code: str) -> str:
    return f"; {_ADVICE[code]}" if code in _ADVICE else ""
