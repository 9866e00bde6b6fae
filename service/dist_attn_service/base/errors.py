"""The error tree of the service and the one JSON body that every error is sent in.

    ServiceError                    anything the API answers on purpose: status, code, message, param
    ├── BadRequest          400     what was sent cannot be used
    ├── NotFound            404     no such model, route
    ├── TooLarge            413     over a limit that the message names
    ├── Conflict            409     a session, job or file is not as the client thinks
    ├── EngineUnavailable   503     try again soon: not ready, unreachable, stopping
    ├── EngineFailure       5xx     the engine gave up on this request; 503: it is gone, 504: it is silent
    ├── ServiceStopping     503     the server stops while the request is under way
    └── UnforeseenError     500     a bug of ours
    ClientGone                      the client has left: no answer

The body is RFC 9457 (`application/problem+json`) and OpenAI's `{"error": {…}}` at once.
"""

import math
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, ClassVar

import msgspec

from dist_attn.errors import NO_ROOM
from dist_attn_api.errors import Code

__all__ = [
    "DRAINING",
    "MOST_RETRY_SECONDS",
    "NO_RETRY",
    "PROBLEM_JSON",
    "BadRequest",
    "ClientGone",
    "Code",
    "Conflict",
    "EngineFailure",
    "EngineUnavailable",
    "NotFound",
    "ServiceError",
    "ServiceStopping",
    "TooLarge",
    "UnforeseenError",
    "disk_code",
    "engine_error",
    "retry_after",
]

PROBLEM_JSON = "application/problem+json"
NO_RETRY = {"x-should-retry": "false"}  # OpenAI's clients send 409, 429 and 5xx again by themselves
MOST_RETRY_SECONDS = 120  # clients do not come back by themselves after longer waits


def disk_code(error: OSError) -> Code:
    """The error code where a file could not be read or written."""
    return Code.DISK_FULL if error.errno in NO_ROOM else Code.STORAGE_FAILED


def retry_after(seconds: float) -> dict[str, str]:
    """The header that says when to come back: whole seconds from 1 to MOST_RETRY_SECONDS."""
    return {"retry-after": str(min(MOST_RETRY_SECONDS, max(1, math.ceil(seconds))))}


class ClientGone(Exception):
    """The client closed the connection; there is no one to answer."""


class ServiceError(Exception):
    """An answer other than success: HTTP status, code of the closed set, a message, the parameter it is about.

    Without a `status` it is that of the code; `headers` come beside those of the kind. `facts` are the values that a
    program needs to go on; they stand in the problem document beside its own members.
    """

    default_code = Code.INTERNAL_ERROR
    default_headers: ClassVar[Mapping[str, str]] = {}

    def __init__(
        self,
        message: str,
        *,
        code: Code | None = None,
        param: str | None = None,
        status: int | None = None,
        headers: dict[str, str] | None = None,
        facts: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or self.default_code
        self.param = param
        self.status = status or self.code.status
        self.headers = {**self.default_headers, **(headers or {})}
        self.facts = facts or {}

    @property
    def openai_type(self) -> str:
        """OpenAI's coarse `error.type`."""
        if self.status == 429:
            return "rate_limit_error"
        return "invalid_request_error" if self.status < 500 else "server_error"

    def error_object(self) -> dict[str, Any]:
        """OpenAI's error object, as it also stands in event streams and NDJSON error lines."""
        return {"message": self.message, "type": self.openai_type, "param": self.param, "code": str(self.code)}

    def body(self, instance: str | None = None) -> bytes:
        """The whole problem document; `instance` is the request id."""
        return msgspec.json.encode(
            {
                "type": f"urn:dist-attn:problem:{self.code}",
                "title": HTTPStatus(self.status).phrase,
                "status": self.status,
                "detail": self.message,
                "instance": instance,
                **self.facts,
                "error": self.error_object(),
            }
        )

    def line(self) -> bytes:
        """The last line of an NDJSON stream that ends with this error."""
        return msgspec.json.encode({"object": "error", **self.facts, "error": self.error_object()}) + b"\n"

    def events(self) -> bytes:
        """The last events of an event stream that ends with this error."""
        return b"data: " + msgspec.json.encode({**self.facts, "error": self.error_object()}) + b"\n\ndata: [DONE]\n\n"


class BadRequest(ServiceError):
    """The service cannot use what was sent."""

    default_code = Code.INVALID_VALUE


class NotFound(ServiceError):
    """There is nothing of that name."""

    default_code = Code.NOT_FOUND


class TooLarge(ServiceError):
    """The request exceeds a limit that the message names."""

    default_code = Code.BODY_TOO_LARGE


class Conflict(ServiceError):
    """A session, job or file is not as the client thinks: the same request would be refused again."""

    default_code = Code.CONFLICT
    default_headers = NO_RETRY


class EngineUnavailable(ServiceError):
    """The engine cannot take the request now; a client may try again soon, since new requests wait for an engine."""

    default_code = Code.ENGINE_NOT_READY

    def __init__(self, message: str, *, code: Code | None = None, retry_after_seconds: float = 1) -> None:
        super().__init__(message, code=code, headers=retry_after(retry_after_seconds))


class EngineFailure(ServiceError):
    """The engine gave up on this request."""

    default_code = Code.ENGINE_FAILED


DRAINING = "draining: the service is stopping and lets open streams end"


class ServiceStopping(ServiceError):
    """The server stops while the request is under way."""

    default_code = Code.STOPPING

    def __init__(self) -> None:
        super().__init__(f"{DRAINING}; send the request again", headers={"retry-after": "5"})


class UnforeseenError(ServiceError):
    """A bug of the service; the log says which."""

    def __init__(self) -> None:
        super().__init__("the service met an error of its own; its log has the request id")


def engine_error(code: str, message: str, retry_after_seconds: int | None = None) -> ServiceError:
    """The HTTP answer for a controller's `Failed` message; an unknown code counts as engine_failed."""
    known = Code.of(code)
    match known:
        case Code.ENGINE_NOT_READY | Code.ENGINE_UNREACHABLE | Code.STOPPING:
            return EngineUnavailable(message, code=known)
        case Code.OVERLOADED:
            return ServiceError(message, code=Code.OVERLOADED, headers=retry_after(retry_after_seconds or 1))
        case Code.DEADLINE_EXCEEDED | Code.STATE_MISMATCH | Code.STATE_DAMAGED | Code.STORAGE_FAILED:
            return ServiceError(message, code=known, headers=NO_RETRY)
        case Code.ENGINE_FAILED | None:
            return EngineFailure(message)
        case _:
            return ServiceError(message, code=known)
