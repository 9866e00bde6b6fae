"""The headers of resumable uploads.

Reference: tus.io/protocols/resumable-upload, version 1.0.0, with creation, creation-with-upload, expiration and
termination.
"""

import base64
import binascii
import re
from collections.abc import Mapping
from email.utils import formatdate

from dist_attn_service.base.errors import BadRequest, Code, ServiceError

VERSION = "1.0.0"
EXTENSIONS = "creation,creation-with-upload,expiration,termination"
RESUMABLE, LENGTH, OFFSET, METADATA = "Tus-Resumable", "Upload-Length", "Upload-Offset", "Upload-Metadata"
OFFSET_STREAM = "application/offset+octet-stream"
METADATA_BYTES = 8 << 10
_MOST = 1 << 53


def check_version(headers: Mapping[str, str]) -> None:
    """Accept this service's version of tus, or a request without the header.

    Raises: ServiceError (412) for another version.
    """
    version = headers.get(RESUMABLE, VERSION)
    if version != VERSION:
        raise ServiceError(
            f"{RESUMABLE} is {version[:40]!r}; this service speaks {VERSION}",
            code=Code.INVALID_VALUE,
            status=412,
            param=RESUMABLE,
            headers={"tus-version": VERSION},
        )


def parse_count(headers: Mapping[str, str], name: str) -> int:
    """Read a number of bytes from a header.

    Raises: BadRequest when it is missing or is no number.
    """
    value = headers.get(name)
    if value is None:
        raise BadRequest(f"the header {name} is missing; it is required", code=Code.MISSING_PARAMETER, param=name)
    if not re.fullmatch("[0-9]{1,16}", value) or int(value) > _MOST:
        raise BadRequest(f"{name} is {value[:40]!r}; a number of bytes in digits was needed", param=name)
    return int(value)


def parse_metadata(value: str) -> dict[str, str]:
    """Read Upload-Metadata: keys with base64 of their values, which are UTF-8; a key alone has an empty value.

    Raises: BadRequest for anything else, a key given twice included.
    """
    if len(value) > METADATA_BYTES:
        raise _no_metadata(f"it has {len(value)} characters, and may have {METADATA_BYTES}")
    values: dict[str, str] = {}
    for pair in filter(None, (part.strip(" ") for part in value.split(","))):
        key, _, coded = pair.partition(" ")
        if not re.fullmatch(r"[\x21-\x7e]+", key) or key in values:
            raise _no_metadata(f"{key[:40]!r} is no key, or is given twice")
        try:
            values[key] = base64.b64decode(coded.strip(" "), validate=True).decode("utf-8")
        except (binascii.Error, ValueError):
            raise _no_metadata(f"the value of {key[:40]!r} is not base64 of UTF-8") from None
    return values


def http_date(moment: float) -> str:
    """Seconds since 1970 as HTTP writes a date."""
    return formatdate(moment, usegmt=True)


def _no_metadata(why: str) -> ServiceError:
    return BadRequest(f"{METADATA} cannot be read: {why}", param=METADATA)
