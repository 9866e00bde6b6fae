"""A document as the body of a request, for routes that encode it now or later."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from pydantic import BaseModel
from starlette.requests import Request

from dist_attn.text.plain import HEAD_BYTES
from dist_attn_service.base.errors import BadRequest, Code, NotFound, ServiceError, TooLarge
from dist_attn_service.base.parsing import utf8
from dist_attn_service.dependencies import FORM_BYTES, Services, content_length, media_type
from dist_attn_service.encodings.documents import Source
from dist_attn_service.http.exchange import RequestBody
from dist_attn_service.text.text_check import TextCheck, refuse_other, utf8_checked
from dist_attn_service.uploads.entries import FileRecord
from dist_attn_service.uploads.multipart import FieldBytes, FieldStart, FormParser, boundary_of

__all__ = [
    "DOCUMENTS",
    "JSON",
    "TEXT",
    "document_source",
    "named_file",
    "named_source",
    "no_error_trailer",
    "query_parameters",
]

TEXT, BYTES, JSON, FORM = "text/plain", "application/octet-stream", "application/json", "multipart/form-data"
DOCUMENTS: dict[str, Any] = {
    TEXT: {"schema": {"type": "string"}},
    BYTES: {"schema": {"type": "string", "format": "binary"}},
    FORM: {
        "schema": {
            "type": "object",
            "required": ["file"],
            "properties": {"file": {"type": "string", "format": "binary"}},
            "additionalProperties": False,
        }
    },
}
"""Bodies that are documents, for the OpenAPI document."""


def query_parameters(kind: type[BaseModel], leave_out: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The fields of a model as parameters of a query, for the OpenAPI document."""
    fields = {name: schema for name, schema in kind.model_json_schema()["properties"].items() if name not in leave_out}
    return [{"name": name, "in": "query", "required": False, "schema": schema} for name, schema in fields.items()]


def document_source(request: Request, services: Services, body: RequestBody) -> Source:
    """A body that is a document itself, or a form with one as its file.

    Raises: ServiceError (415) for a type that is none, BadRequest for a boundary that is none, TooLarge for one that is
        declared too long.
    """
    kind = media_type(request, gzip=True)
    refuse_other(b"", kind)
    if kind not in (TEXT, BYTES, FORM, ""):
        raise ServiceError(
            f"Content-Type is {kind[:80]!r}; send -H 'Content-Type: {TEXT}' (UTF-8), {BYTES} (any bytes), {JSON}, or "
            f"a form (curl -F file=@book.txt)",
            code=Code.UNSUPPORTED_MEDIA_TYPE,
        )
    length, limit = content_length(request), services.settings.body_bytes
    if length is not None and length > limit + FORM_BYTES * (kind == FORM):
        raise TooLarge(f"the body has {length} bytes; a document may have {limit}")
    size = None if body.gzip else length
    if kind == FORM:
        return Source(
            pieces=_file_of_form(body.chunks(), boundary_of(request.headers.get("content-type", ""))), size=size
        )
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


async def named_source(services: Services, caller: str, text: str | None, file_id: str | None) -> Source:
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
    file = await named_file(services, caller, file_id)
    pieces = services.files.read(file)
    is_text = file.details.mime_type.lower().startswith("text/")
    return Source(pieces=utf8_checked(pieces) if is_text else pieces, stored=True, size=file.size)


async def named_file(services: Services, caller: str, file_id: str) -> FileRecord:
    """A file of this caller that can be read as a document.

    Raises: NotFound, BadRequest for an empty one, ServiceError (415) for one that is not plain text, TooLarge.
    """
    try:
        file = await services.files.files.get(caller, file_id)
    except NotFound as error:
        raise NotFound(error.message, param="file_id") from None
    if not file.size:
        raise BadRequest("the file is empty; name one with a text", code=Code.EMPTY_INPUT, param="file_id")
    if file.size > services.settings.body_bytes:
        raise TooLarge(f"the file has {file.size} bytes; a document may have {services.settings.body_bytes}")
    async with aclosing(services.files.read(file, 0, min(HEAD_BYTES, file.size))) as pieces:
        refuse_other(b"".join([piece async for piece in pieces]), file.details.mime_type.lower())
    return file


def no_error_trailer(_: ServiceError) -> None:
    """The last words of a format that has none for an error."""
