"""Which bytes a Range header asks for. Reference: RFC 9110, section 14."""

import re

from dist_attn_service.base.errors import Code, ServiceError

_RANGE = re.compile(r"[ \t]*bytes=[ \t]*([0-9]{0,18})-([0-9]{0,18})[ \t]*", re.IGNORECASE)


def byte_range(header: str | None, size: int) -> tuple[int, int] | None:
    """The first byte and the one after the last; None to send all.

    A header that is no range of bytes, or several of them, is ignored, as a server may.

    Raises: ServiceError (416) for a range without a byte of the file.
    """
    found = _RANGE.fullmatch(header or "")
    if found is None or found[1] == found[2] == "":
        return None
    if not found[1]:
        start, stop = max(0, size - int(found[2])), size
    else:
        start, stop = int(found[1]), min(size, int(found[2]) + 1 if found[2] else size)
        if found[2] and int(found[2]) < start:
            return None
    if start >= stop:
        raise ServiceError(
            f"Range {(header or '')[:60]!r} holds no byte of a file of {size} bytes",
            code=Code.INVALID_VALUE,
            status=416,
            param="Range",
            headers={"content-range": f"bytes */{size}"},
        )
    return start, stop
