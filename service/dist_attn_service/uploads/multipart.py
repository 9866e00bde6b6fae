"""multipart/form-data while it arrives: fields and their bytes, wherever the stream is cut; strict and bounded.

Reference: RFC 7578 over RFC 2046 section 5.1, without preamble, epilogue and nested parts, which clients do not send.
python-multipart, which Starlette can use, takes a body that ends before its last boundary, bytes after it, and any
number of fields, and its errors name places of bytes: a file that broke off would be kept as if it were whole.
"""

import re
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import final

from dist_attn_service.base.errors import BadRequest, Code, ServiceError
from dist_attn_service.http.exchange import RequestBody
from dist_attn_service.uploads.byte_files import BlobWriter, arriving

HEAD_BYTES = 8 << 10  # of one field
MOST_FIELDS = 32
FIELD_BYTES = 4 << 10  # of the values of other fields than the file
_BOUNDARY = re.compile(r";[ \t]*boundary=(?:\"([^\"]*)\"|([^\s;\"]+))[ \t]*(?=;|$)", re.IGNORECASE)
_BOUNDARY_CHARACTERS = re.compile(r"[0-9A-Za-z'()+_,./:=? -]{0,69}[0-9A-Za-z'()+_,./:=?-]")
_HEADER = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*+([^\x00-\x08\x0a-\x1f\x7f]*)")
_PARAMETER = re.compile(r"[ \t]*;[ \t]*([0-9A-Za-z*_-]+)=(\"(?:[^\"\\]|\\.)*\"|[^\s;\"]+)")


@dataclass(frozen=True)
class FieldStart:
    """The beginning of a field; `filename` is None where none was given."""

    name: str
    filename: str | None
    content_type: str


@dataclass(frozen=True)
class FieldBytes:
    """The next bytes of the field; never empty."""

    data: bytes


@dataclass(frozen=True)
class FieldEnd:
    """The end of a field."""


FormEvent = FieldStart | FieldBytes | FieldEnd


class _At(Enum):
    START = auto()
    AFTER_BOUNDARY = auto()
    HEAD = auto()
    DATA = auto()
    END = auto()


def boundary_of(content_type: str) -> bytes:
    """The boundary that a Content-Type of multipart/form-data names.

    Raises: BadRequest when there is none, or one that RFC 2046 does not allow.
    """
    match = _BOUNDARY.search(content_type)
    boundary = (match[1] if match[1] is not None else match[2]) if match else ""
    if not _BOUNDARY_CHARACTERS.fullmatch(boundary):
        raise BadRequest(
            f"the boundary {boundary[:80]!r} of the multipart body is not one; needed are 1 to 70 characters, as every "
            "HTTP library sends them by itself",
            code=Code.INVALID_VALUE,
        )
    return boundary.encode("ascii")


@final
class FormParser:
    """A parser that takes the body in any pieces and gives its events; holds at most a field's head and a boundary."""

    def __init__(self, boundary: bytes) -> None:
        self._delimiter = b"\r\n--" + boundary
        # So that the first boundary, which begins the body, looks like all others.
        self._held = bytearray(b"\r\n")
        self._at = _At.START
        self._fields = 0

    def push(self, chunk: bytes) -> list[FormEvent]:
        """The events that the next bytes complete.

        Raises: BadRequest for bytes that are no form.
        """
        self._held += chunk
        events: list[FormEvent] = []
        while self._step(events):
            pass
        return events

    def finish(self) -> None:
        """End the body.

        Raises: BadRequest when the last boundary is missing.
        """
        if self._at is not _At.END:
            raise _broken("the body ends before its last boundary")

    def _step(self, events: list[FormEvent]) -> bool:
        """Take one step; return whether the bytes at hand may allow another one."""
        match self._at:
            case _At.START:
                return self._start()
            case _At.AFTER_BOUNDARY:
                return self._after_boundary()
            case _At.HEAD:
                return self._head(events)
            case _At.DATA:
                return self._data(events)
            case _At.END:
                if not b"\r\n".startswith(self._held):
                    raise _broken("something follows the last boundary")
                return False

    def _start(self) -> bool:
        if not self._delimiter.startswith(self._held[: len(self._delimiter)]):
            raise _broken("the body does not begin with its boundary")
        if len(self._held) < len(self._delimiter):
            return False
        del self._held[: len(self._delimiter)]
        self._at = _At.AFTER_BOUNDARY
        return True

    def _after_boundary(self) -> bool:
        if len(self._held) < 2:
            return False
        after = bytes(self._held[:2])
        if after not in (b"\r\n", b"--"):
            raise _broken("a boundary is followed by something else than the end of its line")
        del self._held[:2]
        self._at = _At.HEAD if after == b"\r\n" else _At.END
        return True

    def _head(self, events: list[FormEvent]) -> bool:
        end = self._held.find(b"\r\n\r\n", 0, HEAD_BYTES + 4)
        if end < 0:
            if len(self._held) > HEAD_BYTES + 4:
                raise _broken(f"the head of a field has more than {HEAD_BYTES} bytes")
            return False
        self._fields += 1
        if self._fields > MOST_FIELDS:
            raise _broken(f"the form has more than {MOST_FIELDS} fields")
        events.append(_field(bytes(self._held[:end])))
        del self._held[: end + 4]
        self._at = _At.DATA
        return True

    def _data(self, events: list[FormEvent]) -> bool:
        at = self._held.find(self._delimiter)
        # Without a boundary in sight, the last bytes may be the beginning of one.
        sure = at if at >= 0 else max(0, len(self._held) - len(self._delimiter) + 1)
        if sure:
            events.append(FieldBytes(bytes(memoryview(self._held)[:sure])))
            del self._held[:sure]
        if at < 0:
            return False
        del self._held[: len(self._delimiter)]
        events.append(FieldEnd())
        self._at = _At.AFTER_BOUNDARY
        return True


def _field(head: bytes) -> FieldStart:
    """Parse the head of a field.

    Raises: BadRequest when it is no head, or names no field.
    """
    try:
        lines = head.decode("utf-8").split("\r\n")
    except UnicodeDecodeError:
        raise _broken("the head of a field is not UTF-8") from None
    headers: dict[str, str] = {}
    for line in lines:
        match = _HEADER.fullmatch(line)
        if match is None:
            raise _broken(f"{line[:80]!r} is no header of a field")
        if headers.setdefault(match[1].lower(), match[2]) != match[2]:
            raise _broken(f"a field has {match[1][:80]} twice")
    if headers.get("content-transfer-encoding", "binary").lower() not in ("binary", "8bit", "7bit"):
        raise _broken("a field has a Content-Transfer-Encoding; send its bytes as they are")
    parameters = _disposition(headers.get("content-disposition", ""))
    if not parameters.get("name"):
        raise _broken("a field has no name")
    return FieldStart(parameters["name"], parameters.get("filename"), headers.get("content-type", "").strip())


def _disposition(value: str) -> dict[str, str]:
    """The parameters of a Content-Disposition: form-data."""
    kind, parameters, at = value[:9], {}, 9
    if kind.lower() != "form-data":
        raise _broken("a field has no Content-Disposition: form-data")
    while at < len(value.rstrip()):
        match = _PARAMETER.match(value, at)
        if match is None or match[1].lower() in parameters:
            raise _broken(f"{value[:80]!r} is no Content-Disposition of a form")
        text = match[2]
        if text.startswith('"'):
            # Browsers write a quote as %22, older clients as \"; a backslash before anything else is itself.
            text = text[1:-1].replace('\\"', '"').replace("%22", '"')
        parameters[match[1].lower()] = text
        at = match.end()
    return parameters


def _broken(what: str) -> ServiceError:
    return BadRequest(f"the multipart body cannot be read: {what}", code=Code.INVALID_VALUE)


# ---- a form whose file is written while it arrives -----------------------------------------------


@dataclass
class Form:
    """A form: the head of its one file, whose bytes are elsewhere, and the values of other fields."""

    file: FieldStart | None = None
    values: dict[str, str] = field(default_factory=dict)


async def read_form(
    body: RequestBody,
    boundary: bytes,
    writer: BlobWriter,
    *,
    file_field: str,
    fields: Collection[str],
    room_for: Callable[[int], Awaitable[None]],
) -> Form:
    """Write the file of a form, and return its other fields; `room_for` gets every size before it is written.

    Raises: BadRequest for another form than is needed, what `room_for` and the body raise.
    """
    parser, form = FormParser(boundary), Form()
    value: tuple[str, bytearray] | None = None
    async for chunk in arriving(body, writer):
        for event in parser.push(chunk):
            if isinstance(event, FieldStart):
                value = _begin(event, form, file_field, fields)
            elif not isinstance(event, FieldBytes):
                if value is not None:
                    form.values[value[0]] = _text(*value)
            elif value is None:
                await room_for(writer.end + len(event.data))
                await writer.write(event.data)
            else:
                value[1].extend(event.data)
                if len(value[1]) > FIELD_BYTES:
                    raise BadRequest(f"{value[0]} has more than {FIELD_BYTES} bytes", param=value[0])
    parser.finish()
    if form.file is None:
        raise BadRequest(f"{file_field} is missing; it is required", code=Code.MISSING_PARAMETER, param=file_field)
    return form


def _begin(start: FieldStart, form: Form, file_field: str, fields: Collection[str]) -> tuple[str, bytearray] | None:
    """Begin a field; return the name and the buffer of its value, or None for the file, whose bytes are written."""
    name = start.name
    if name != file_field and name not in fields:
        known = ", ".join(sorted([file_field, *fields]))
        raise BadRequest(
            f"unknown field {name[:200]!r}; known are {known}", code=Code.UNKNOWN_PARAMETER, param=name[:200]
        )
    if name in form.values or (name == file_field and form.file is not None):
        raise BadRequest(f"{name} is given more than once; give it once", param=name)
    if name != file_field:
        return name, bytearray()
    form.file = start
    return None


def _text(name: str, data: bytearray) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise BadRequest(f"{name} is not UTF-8", code=Code.INVALID_UTF8, param=name) from None
