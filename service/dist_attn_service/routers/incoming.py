"""A request as the routes have it: what serves it, its body as JSON or as a document, and the ways to answer."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Set
from contextlib import AbstractContextManager, aclosing
from functools import cached_property
from typing import Annotated, Any, TypeVar, final

import msgspec
import numpy as np
from fastapi import Depends
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from dist_attn.text.plain import HEAD_BYTES
from dist_attn_service.base.errors import BadRequest, Code, NotFound, ServiceError, TooLarge
from dist_attn_service.base.parsing import parse_json, parse_query, refuse, utf8
from dist_attn_service.dependencies import (
    FORM_BYTES,
    Services,
    content_length,
    media_type,
    read_json_body,
    read_options,
    record_of,
    services_of,
)
from dist_attn_service.encodings.documents import Source
from dist_attn_service.http.exchange import RequestBody, ResponseWriter, StreamedResponse
from dist_attn_service.routers.openapi import ANY_BYTES, ANY_TEXT, BYTES, FORM, JSON, TEXT, form
from dist_attn_service.text.text_check import TextCheck, refuse_other, utf8_checked
from dist_attn_service.uploads.ledger import FileRecord
from dist_attn_service.uploads.multipart import FieldBytes, FieldStart, FormParser, boundary_of

M = TypeVar("M", bound=BaseModel)
DOCUMENTS = {TEXT: ANY_TEXT, BYTES: ANY_BYTES, **form("file", file=ANY_BYTES["schema"])}
"""Bodies that are documents, for the OpenAPI document."""


@final
class Incoming:
    """One request, and what serves it."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.headers = request.headers
        self.services: Services = services_of(request)
        self.record = record_of(request)
        self.caller = self.record.caller

    @cached_property
    def body(self) -> RequestBody:
        """The one owner of its `receive`."""
        return self.services.body(self.request)

    def place(self) -> AbstractContextManager[None]:
        """One of the places of open requests, for as long as the block runs. Raises: ServiceError when none is free."""
        return self.services.open_requests.one(self.record.holder)

    async def json(self, kind: type[M]) -> M:
        """Its body. Raises: ServiceError for what is no such JSON, or is too long."""
        return parse_json(await read_json_body(self.request, self.body, self.services.settings.json_body_bytes), kind)

    async def options(self, kind: type[M]) -> M:
        """Its body, which may be left out: then everything is as it is by default. Raises: as `json`."""
        return parse_json(await read_options(self.request, self.body), kind)

    def query(self, kind: type[M]) -> M:
        """Its query. Raises: BadRequest naming the option."""
        return parse_query(self.request.query_params.multi_items(), kind)

    def streamed(
        self, write: Callable[[ResponseWriter], Awaitable[None]], last_words: Callable[[ServiceError], bytes | None]
    ) -> StreamedResponse:
        """What `write` writes, in a place of its own; `last_words` says a later error, or None: break off."""

        async def exchange(writer: ResponseWriter) -> None:
            with self.place():
                await write(writer)

        stall = self.services.settings.client_stall_seconds
        return StreamedResponse(exchange, self.body, self.record, last_words=last_words, stall_seconds=stall)


async def incoming(request: Request) -> Incoming:
    """A coroutine, as others are run in threads."""
    return Incoming(request)


Asked = Annotated[Incoming, Depends(incoming)]


def json_response(value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A value of `dist_attn_api.types` as an answer."""
    return Response(msgspec.json.encode(value), status_code=status, headers=headers, media_type=JSON)


def validated(kind: type[M], values: Any) -> M:
    """Values that did not come as JSON, checked as if they had. Raises: BadRequest naming what is wrong."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise refuse(error.errors(include_url=False, include_context=False), kind) from None


def no_error_trailer(_: ServiceError) -> None:
    """The last words of a format that has none for an error."""


# ---- documents -----------------------------------------------------------------------------------


def document_source(asked: Incoming) -> Source:
    """A body that is a document itself, or a form with one as its file.

    Raises: ServiceError (415) for a type that is none, BadRequest for a boundary that is none, TooLarge for one that is
        declared too long.
    """
    kind, body = media_type(asked.request, gzip=True), asked.body
    refuse_other(b"", kind)
    if kind not in (TEXT, BYTES, FORM, ""):
        raise ServiceError(
            f"Content-Type is {kind[:80]!r}; send -H 'Content-Type: {TEXT}' (UTF-8), {BYTES} (any bytes), {JSON}, or "
            f"a form (curl -F file=@book.txt)",
            code=Code.UNSUPPORTED_MEDIA_TYPE,
        )
    length, limit = content_length(asked.request), asked.services.settings.body_bytes
    if length is not None and length > limit + FORM_BYTES * (kind == FORM):
        raise TooLarge(f"the body has {length} bytes; a document may have {limit}")
    size = None if body.gzip else length
    if kind == FORM:
        boundary = boundary_of(asked.headers.get("content-type", ""))
        return Source(pieces=_file_of_form(body.chunks(), boundary), size=size)
    return Source(pieces=body.chunks() if kind == BYTES else _text(body.chunks(), kind), size=size)


async def _text(chunks: AsyncGenerator[bytes], kind: str) -> AsyncGenerator[bytes]:
    """A body of text, checked as it comes.

    Raises: as `TextCheck`.
    """
    check = TextCheck(kind)
    async with aclosing(chunks):
        async for chunk in chunks:
            if data := check.push(chunk):
                yield data
    if data := check.push(b"", final=True):
        yield data


async def _file_of_form(chunks: AsyncGenerator[bytes], boundary: bytes) -> AsyncGenerator[bytes]:
    """The one file of a form, checked as it comes; clients send application/octet-stream for what they do not know.

    Raises: BadRequest for another form, as `TextCheck`.
    """
    parser, check = FormParser(boundary), None
    async with aclosing(chunks):
        async for chunk in chunks:
            for event in parser.push(chunk):
                if isinstance(event, FieldStart):
                    check = _begin_file(event, check)
                elif check is not None:
                    data = check.push(event.data) if isinstance(event, FieldBytes) else check.push(b"", final=True)
                    if data:
                        yield data
    parser.finish()
    if check is None:
        raise BadRequest(
            "the form has no file; send one, as with curl -F file=@book.txt", code=Code.MISSING_PARAMETER, param="file"
        )


def _begin_file(start: FieldStart, before: TextCheck | None) -> TextCheck:
    """The check of a form's file, which begins.

    Raises: BadRequest for another field or a second file, as `TextCheck`.
    """
    if start.filename is None:
        raise BadRequest(
            f"the form has a field {start.name[:80]!r} beside its file; send options in the query, like ?window=512",
            code=Code.UNKNOWN_PARAMETER,
            param=start.name[:80],
        )
    if before is not None:
        raise BadRequest("the form has more than one file; send one document at a time", param="file")
    return TextCheck(start.content_type.partition(";")[0].strip().lower())


async def named_source(asked: Incoming, text: str | None, file_id: str | None) -> Source:
    """The document of a JSON body: the text that stands in it, or the file that it names.

    Raises: BadRequest unless it has one of both, and for one that is empty; NotFound, TooLarge.
    """
    if text is None and file_id is None:
        raise BadRequest(
            "input is missing; send it, or the file_id of a file", code=Code.MISSING_PARAMETER, param="input"
        )
    if file_id is None:
        if not text:
            raise BadRequest("input is empty; send a text", code=Code.EMPTY_INPUT, param="input")
        data = utf8(text, "input", "input")
        refuse_other(data[:HEAD_BYTES])
        return Source(text=data, size=len(data))
    if text is not None:
        raise BadRequest("input and file_id are two documents; send one of them", param="file_id")
    file = await named_file(asked, file_id)
    pieces = asked.services.files.read(file.segments, 0, file.size)
    is_text = file.details.mime_type.lower().startswith("text/")
    return Source(pieces=utf8_checked(pieces) if is_text else pieces, stored=True, size=file.size)


def check_boundaries(boundaries: list[int], named: Set[str], source: Source) -> None:
    """Raises: BadRequest for offsets that do not rise or lie outside the document, and beside others of `named`."""
    if others := named & {"granularity", "window"}:
        other = min(others)
        raise BadRequest(f"boundaries and {other} were given; rows end at one or the other", param="boundaries")
    places = np.array(boundaries, dtype=np.int64)
    if len(falls := np.flatnonzero(np.diff(places) <= 0)):
        before, after = places[falls[0]], places[falls[0] + 1]
        raise BadRequest(
            f"boundaries must rise: {after} stands behind {before}, as number {falls[0] + 1}", param="boundaries"
        )
    if source.size is not None and places[-1] > source.size:
        raise BadRequest(
            f"boundaries has {places[-1]}, and the document {source.size} bytes: offsets are in bytes of its UTF-8",
            param="boundaries",
        )


async def named_file(asked: Incoming, file_id: str) -> FileRecord:
    """A file of this caller that can be read as a document.

    Raises: NotFound, BadRequest for an empty one, ServiceError (415) for one that is not plain text, TooLarge.
    """
    services = asked.services
    try:
        file = await services.files.catalogue.file(asked.caller, file_id)
    except NotFound as error:
        raise NotFound(error.message, param="file_id") from None
    if not file.size:
        raise BadRequest("the file is empty; name one with a text", code=Code.EMPTY_INPUT, param="file_id")
    if file.size > services.settings.body_bytes:
        raise TooLarge(f"the file has {file.size} bytes; a document may have {services.settings.body_bytes}")
    async with aclosing(services.files.read(file.segments, 0, min(HEAD_BYTES, file.size))) as pieces:
        refuse_other(b"".join([piece async for piece in pieces]), file.details.mime_type.lower())
    return file
