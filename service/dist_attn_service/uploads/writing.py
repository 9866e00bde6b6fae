"""Bytes of a request to disk while they arrive: as a stream that goes on, or as the file of a form."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from dataclasses import dataclass, field
from typing import Protocol

from dist_attn_service.base.errors import BadRequest, Code, ServiceError
from dist_attn_service.http.exchange import RequestBody
from dist_attn_service.uploads.byte_files import BlobWriter
from dist_attn_service.uploads.multipart import FieldBytes, FieldStart, FormParser

QUIET_SECONDS = 0.5  # after a pause of so long all that came is with the system, and others may take over
FIELD_BYTES = 4 << 10


@dataclass
class Form:
    """What a form holds: one file, whose bytes are elsewhere, and values of other fields."""

    file: FieldStart | None = None
    values: dict[str, str] = field(default_factory=dict)


class Reader(Protocol):
    """Somebody who reads an upload while it arrives."""

    def reached(self, size: int) -> None:
        """So many bytes may be read."""

    def keeps_up(self, size: int) -> bool:
        """Whether so many bytes may have come by now.

        Raises: ServiceError when nobody will read them.
        """

    async def changed(self, seconds: float) -> None:
        """Wait until that may have changed, at most so long."""


async def kept_up(reader: Reader, writer: BlobWriter) -> None:
    """Wait until the reader is not too far behind what was written.

    Raises: ServiceError when it has failed; (409) when somebody else is to go on, or what is written to was deleted.
    """
    while not reader.keeps_up(writer.end):
        await writer.flush()
        await reader.changed(QUIET_SECONDS)
        await _make_way(writer)


async def arriving(body: RequestBody, writer: BlobWriter) -> AsyncIterator[bytes]:
    """The body, until it ends or somebody else wants to write.

    Raises: what the body raises; ServiceError (409) when somebody else is to go on, or what is written to was deleted.
    """
    chunks = body.chunks()
    looked = time.monotonic()
    waiting: asyncio.Future[bytes] | None = None
    try:
        while True:
            waiting = asyncio.ensure_future(anext(chunks, b""))
            while not (await asyncio.wait({waiting}, timeout=QUIET_SECONDS))[0]:
                await writer.flush()
                await _make_way(writer)
            if not (chunk := waiting.result()):
                return
            if time.monotonic() - looked > QUIET_SECONDS:
                await _make_way(writer)
                looked = time.monotonic()
            yield chunk
    finally:
        if waiting is not None and not waiting.done():
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        await chunks.aclose()


async def read_form(
    body: RequestBody,
    boundary: bytes,
    writer: BlobWriter,
    *,
    file_field: str,
    fields: Collection[str],
    room_for: Callable[[int], Awaitable[None]],
) -> Form:
    """Write the file of a form, and give its other fields; `room_for` is told of every size before it is written.

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
    """Where the bytes of a field go to: None for the file."""
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


async def _make_way(writer: BlobWriter) -> None:
    if await writer.in_the_way():
        raise ServiceError(
            "another request goes on with this upload, or it was deleted; ask where it stands before sending more",
            code=Code.CONFLICT,
        )
