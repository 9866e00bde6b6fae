"""The headers of states and appends: entity tags, digests of content, idempotency keys."""

import base64
import binascii
import re

from starlette.datastructures import Headers

from dist_attn_service.base.errors import BadRequest, Code, ServiceError

_KEY = re.compile(r"[\x21\x23-\x7e]{1,256}")
_TAG = re.compile(r'\s*(W/)?"([\x21\x23-\x7e]*)"\s*(?:,|$)')
_DIGEST = re.compile(r"(?:^|,)\s*sha-256\s*=\s*:([A-Za-z0-9+/=]{0,128}):\s*(?:;[^,]*)?(?=,|$)")


def entity_tag(digest: str) -> str:
    """The strong entity tag (RFC 9110) of content with this SHA-256 in hex."""
    return f'"{digest}"'


def content_digest(digest: str) -> str:
    """The value of `Content-Digest` (RFC 9530) for a SHA-256 in hex."""
    return f"sha-256=:{base64.b64encode(bytes.fromhex(digest)).decode()}:"


def expected_digest(headers: Headers) -> str:
    """The SHA-256 in hex that a request's `Content-Digest` promises, "" without one; others are not looked at.

    Raises: BadRequest for one that is no SHA-256.
    """
    found = _DIGEST.search(headers.get("content-digest", ""))
    if found is None:
        return ""
    try:
        digest = base64.b64decode(found[1], validate=True)
    except binascii.Error:
        digest = b""
    if len(digest) != 32:
        raise BadRequest("Content-Digest holds a sha-256 that is not 32 bytes in base64; send it as sha-256=:…:")
    return digest.hex()


def names_tag(value: str, tag: str) -> bool:
    """Whether a list of entity tags names this one strongly, or is `*`."""
    return value.strip() == "*" or any(not weak and f'"{text}"' == tag for weak, text in _TAG.findall(value))


def require_match(headers: Headers, tag: str) -> None:
    """What takes the place of a state must name it; what is put where none is must not.

    Raises: ServiceError (428) when nothing is named, (412) when something else is.
    """
    wanted = headers.get("if-match")
    if not tag:
        if wanted is not None:
            raise _failed("the session has no state yet, so If-Match names none; leave it out", "")
        return
    none = headers.get("if-none-match")
    if none is not None and (none.strip() == "*" or names_tag(none, tag)):
        raise _failed("the session has a state already", tag)
    if wanted is None:
        raise ServiceError(
            f"the session has a state; to put another in its place send If-Match: {tag}",
            code=Code.PRECONDITION_REQUIRED,
            headers={"etag": tag},
        )
    if not names_tag(wanted, tag):
        raise _failed(f"If-Match is {wanted[:200]}, and the session's state has {tag}", tag)


def idempotency_key(headers: Headers) -> str:
    """The key of `Idempotency-Key`, with or without quotes; "" without one.

    Raises: BadRequest for an unusable one.
    """
    value = headers.get("idempotency-key")
    if value is None:
        return ""
    key = value.strip().strip('"')
    if not _KEY.fullmatch(key):
        raise BadRequest(
            f"Idempotency-Key is {value[:80]!r}; needed are 1 to 256 visible ASCII characters", param="Idempotency-Key"
        )
    return key


def _failed(message: str, tag: str) -> ServiceError:
    headers = {"etag": tag} if tag else {}
    return ServiceError(message, code=Code.PRECONDITION_FAILED, headers=headers)
