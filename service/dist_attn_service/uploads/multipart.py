"""multipart/form-data while it arrives: fields and their bytes, wherever the stream is cut; strict and bounded.

Reference: RFC 7578 over RFC 2046 section 5.1, without preamble, epilogue and nested parts, which clients do not send.
python-multipart, which Starlette can use, takes a body that ends before its last boundary, bytes after it, and any
number of fields, and its errors name places of bytes: a file that broke off would be kept as if it were whole.
multipart 2.0 in strict mode takes bytes after the last boundary or refuses a sound end, as the body is cut, and takes
a preamble, fields with two names, and base64.
"""

import re
from collections.abc import Awaitable, Callable, Collection, Iterator
from dataclasses import dataclass
from itertools import count
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
    """A parser that takes the body in any pieces, and gives the beginnings of fields and, after each, its bytes.

    It holds at most a field's head and a boundary.
    """

    def __init__(self, boundary: bytes) -> None:
        self._delimiter = b"\r\n--" + boundary
        # So that the first boundary, which begins the body, looks like all others.
        self._held = bytearray(b"\r\n")
        self._events: list[FieldStart | bytes] = []
        self._ended = False
        self._reading = self._read()

    def push(self, chunk: bytes) -> list[FieldStart | bytes]:
        """The events that the next bytes complete.

        Raises: BadRequest for bytes that are no form.
        """
        self._held += chunk
        self._events = []
        next(self._reading)
        return self._events

    def finish(self) -> None:
        """End the body.

        Raises: BadRequest when the last boundary is missing.
        """
        if not self._ended:
            raise _broken("the body ends before its last boundary")

    def _read(self) -> Iterator[None]:
        """Read the whole body; each yield waits for more bytes."""
        held, delimiter = self._held, self._delimiter
        while not held.startswith(delimiter):
            if not delimiter.startswith(held):
                raise _broken("the body does not begin with its boundary")
            yield
        for number in count():
            del held[: len(delimiter)]
            while len(held) < 2:
                yield
            if held.startswith(b"--"):
                break
            if not held.startswith(b"\r\n"):
                raise _broken("a boundary is followed by something else than the end of its line")
            if number == MOST_FIELDS:
                raise _broken(f"the form has more than {MOST_FIELDS} fields")
            del held[:2]
            while (end := held.find(b"\r\n\r\n", 0, HEAD_BYTES + 4)) < 0:
                if len(held) > HEAD_BYTES + 4:
                    raise _broken(f"the head of a field has more than {HEAD_BYTES} bytes")
                yield
            self._events.append(_field(bytes(held[:end])))
            del held[: end + 4]
            while (end := held.find(delimiter)) < 0:
                # The last bytes may be the beginning of a boundary.
                self._give(len(held) - len(delimiter) + 1)
                yield
            self._give(end)
        self._ended = True
        del held[:2]
        while b"\r\n".startswith(held):
            yield
        raise _broken("something follows the last boundary")

    def _give(self, size: int) -> None:
        """Give the next bytes of a field."""
        if size > 0:
            self._events.append(bytes(memoryview(self._held)[:size]))
            del self._held[:size]


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


@dataclass(frozen=True)
class Form:
    """A form: the head of its one file, whose bytes are elsewhere, and the values of other fields."""

    file: FieldStart
    values: dict[str, str]


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
    parser, name = FormParser(boundary), ""
    file: FieldStart | None = None
    values: dict[str, bytearray] = {}
    async for chunk in arriving(body, writer):
        for event in parser.push(chunk):
            if isinstance(event, FieldStart):
                name = event.name
                _check_field(
                    name, file_field, fields, given=name in values or (name == file_field and file is not None)
                )
                if name == file_field:
                    file = event
                else:
                    values[name] = bytearray()
            elif name == file_field:
                await room_for(writer.end + len(event))
                await writer.write(event)
            else:
                values[name] += event
                if len(values[name]) > FIELD_BYTES:
                    raise BadRequest(f"{name} has more than {FIELD_BYTES} bytes", param=name)
    parser.finish()
    if file is None:
        raise BadRequest(f"{file_field} is missing; it is required", code=Code.MISSING_PARAMETER, param=file_field)
    return Form(file, {name: _text(name, value) for name, value in values.items()})


def _check_field(name: str, file_field: str, fields: Collection[str], *, given: bool) -> None:
    """Check a field of a form. Raises: BadRequest for one that is not known, or was given before."""
    if name != file_field and name not in fields:
        known = ", ".join(sorted([file_field, *fields]))
        raise BadRequest(
            f"unknown field {name[:200]!r}; known are {known}", code=Code.UNKNOWN_PARAMETER, param=name[:200]
        )
    if given:
        raise BadRequest(f"{name} is given more than once; give it once", param=name)


def _text(name: str, data: bytearray) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise BadRequest(f"{name} is not UTF-8", code=Code.INVALID_UTF8, param=name) from None
