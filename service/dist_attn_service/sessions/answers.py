"""The HTTP of sessions: headers, the store's refusals, and answers that their client may leave."""

import asyncio
import base64
import binascii
import re
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import final

from starlette.datastructures import Headers

from dist_attn.errors import (
    BusyError,
    ConflictError,
    InputError,
    PositionError,
    QuotaError,
    StateDamagedError,
    StateMismatchError,
    StorageError,
    UnknownStateError,
    WireError,
)
from dist_attn_service.base.errors import (
    NO_RETRY,
    BadRequest,
    ClientGone,
    Code,
    Conflict,
    NotFound,
    ServiceError,
    retry_after,
)
from dist_attn_service.http.exchange import RequestBody, ResponseWriter

KEY_PATTERN = r'^[ \t]*"?([!#-~]{1,256})"?[ \t]*$'
_TAG = re.compile(r'(W/)?"([\x21\x23-\x7e]*)"\s*(?:,|$)')
_DIGEST = re.compile(r"(?:^|,)\s*sha-256\s*=\s*:([A-Za-z0-9+/=]{0,128}):\s*(?:;[^,]*)?(?=,|$)")


def entity_tag(digest: str) -> str:
    """The strong entity tag (RFC 9110) of content with this SHA-256 in hex."""
    return f'"{digest}"'


def content_digest(digest: str) -> str:
    """The value of `Content-Digest` (RFC 9530) for a SHA-256 in hex."""
    return f"sha-256=:{base64.b64encode(bytes.fromhex(digest)).decode()}:"


def expected_digest(headers: Headers) -> str:
    """The SHA-256 in hex that a request's `Content-Digest` promises, "" without one; others are not looked at.

    Raises: BadRequest for a value that is no SHA-256.
    """
    match = _DIGEST.search(headers.get("content-digest", ""))
    if match is None:
        return ""
    try:
        digest = base64.b64decode(match[1], validate=True)
    except binascii.Error:
        digest = b""
    if len(digest) != 32:
        raise BadRequest("Content-Digest holds a sha-256 that is not 32 bytes in base64; send it as sha-256=:…:")
    return digest.hex()


def names_tag(value: str, tag: str) -> bool:
    """Return whether a list of entity tags names this one strongly, or is `*`."""
    return value.strip() == "*" or any(not weak and f'"{text}"' == tag for weak, text in _TAG.findall(value))


def require_match(headers: Headers, tag: str) -> None:
    """Require `If-Match` with the tag of the state that is replaced, and none where there is no state.

    Raises: ServiceError (428) when it is missing, (412) when it names something else.
    """
    if_match = headers.get("if-match")
    if not tag:
        if if_match is not None:
            raise _failed("the session has no state yet, so If-Match names none; leave it out", "")
        return
    none = headers.get("if-none-match")
    if none is not None and (none.strip() == "*" or names_tag(none, tag)):
        raise _failed("the session has a state already; to replace it send If-Match in place of If-None-Match", tag)
    if if_match is None:
        raise ServiceError(
            f"the session has a state; to put another in its place send If-Match: {tag}",
            code=Code.PRECONDITION_REQUIRED,
            headers={"etag": tag},
        )
    if not names_tag(if_match, tag):
        raise _failed(f"If-Match is {if_match[:200]}, and the session's state has {tag}", tag)


def idempotency_key(headers: Headers) -> str:
    """The key of `Idempotency-Key`, with or without quotes; "" without one.

    Raises: BadRequest for an unusable one.
    """
    value = headers.get("idempotency-key")
    if value is None:
        return ""
    found = re.fullmatch(KEY_PATTERN, value)
    if found is None:
        raise BadRequest(
            f"Idempotency-Key is {value[:80]!r}; needed are 1 to 256 visible ASCII characters", param="Idempotency-Key"
        )
    return found[1]


def _failed(message: str, tag: str) -> ServiceError:
    headers = {"etag": tag} if tag else {}
    return ServiceError(message, code=Code.PRECONDITION_FAILED, headers=headers)


@contextmanager
def store_refusals() -> Iterator[None]:
    """Translate the store's errors in the block. Raises: ServiceError in their place."""
    try:
        yield
    except UnknownStateError as error:
        raise NotFound(str(error)) from None
    except PositionError as error:
        facts = {"expected_position": error.expected, "position": error.position}
        if error.start is not None:
            facts["start"] = error.start
        raise Conflict(str(error), facts=facts) from None
    except BusyError as error:
        after = retry_after(error.retry_s)
        raise ServiceError(str(error), code=Code.SESSION_BUSY, headers=after) from None
    except ConflictError as error:
        raise Conflict(str(error)) from None
    except QuotaError as error:
        raise ServiceError(str(error), code=Code.INSUFFICIENT_QUOTA, headers=NO_RETRY) from None
    except StateDamagedError as error:
        raise ServiceError(str(error), code=Code.STATE_DAMAGED, headers=NO_RETRY) from None
    except StorageError as error:
        raise ServiceError(str(error), code=Code.STORAGE_FAILED, headers=NO_RETRY) from None
    except StateMismatchError as error:
        raise ServiceError(str(error), code=Code.STATE_MISMATCH, headers=NO_RETRY) from None
    except WireError as error:
        raise BadRequest(str(error), code=Code.INVALID_STATE) from None
    except InputError as error:
        raise BadRequest(str(error)) from None


@final
class AnswerOutlet:
    """A writer to a client that stops without an error once the client is gone."""

    def __init__(self, writer: ResponseWriter) -> None:
        self._writer = writer
        self.gone = asyncio.Event()

    async def start(self, media_type: str) -> None:
        """Send the head."""
        await self._unless_gone(self._writer.start(media_type))

    async def write(self, data: bytes) -> None:
        """Send bytes as soon as the client takes them."""
        if not self.gone.is_set():
            await self._unless_gone(self._writer.write(data))

    async def finish(self, data: bytes) -> None:
        """Send the last bytes.

        Raises: ClientGone when the client has gone, so that the log says so.
        """
        if self.gone.is_set():
            raise ClientGone
        await self._writer.finish(data)

    async def _unless_gone(self, sending: Awaitable[None]) -> None:
        try:
            await sending
        except ClientGone:
            self.gone.set()


async def watch(body: RequestBody, gone: asyncio.Event) -> None:
    """Wait until the client has left, which sets `gone`, or has its whole answer; the body must have come."""
    try:
        await body.until_gone()
    except ClientGone:
        gone.set()
