"""A document as the body of a request, for routes that encode it now or later."""

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

from pydantic import BaseModel
from starlette.requests import Request

from service.dependencies import Services, media_type
from service.documents import Source
from service.errors import BadRequest, Code, NotFound, ServiceError, TooLarge
from service.exchange import RequestBody
from service.parsing import utf8
from service.text_check import Utf8Check
from service.uploads.entries import FileRecord

__all__ = ["JSON", "document_source", "named_file", "named_source", "no_words", "query_parameters", "whole_body"]

TEXT, BYTES, JSON = "text/plain", "application/octet-stream", "application/json"


def query_parameters(kind: type[BaseModel], leave_out: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The fields of a model as parameters of a query, for the OpenAPI document."""
    fields = {name: schema for name, schema in kind.model_json_schema()["properties"].items() if name not in leave_out}
    return [{"name": name, "in": "query", "required": False, "schema": schema} for name, schema in fields.items()]


def document_source(request: Request, services: Services) -> Source:
    """A body that is a document itself.

    Raises: ServiceError (415) for a type that is none, TooLarge for one that is declared too long.
    """
    kind = media_type(request)
    if kind not in (TEXT, BYTES, ""):
        raise ServiceError(
            f"Content-Type is {kind[:80]!r}; send -H 'Content-Type: {TEXT}' (UTF-8), {BYTES} (any bytes) or {JSON}",
            code=Code.UNSUPPORTED_MEDIA_TYPE,
            status=415,
        )
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > services.settings.body_bytes:
        raise TooLarge(f"the body has {length} bytes; a document may have {services.settings.body_bytes}")
    return Source(check_utf8=kind == TEXT, size=int(length) if length.isdecimal() else None)


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
        return Source(text=data, size=len(data))
    if text is not None:
        raise BadRequest("input and file_id are two documents; send one of them", param="file_id")
    file = await named_file(services, caller, file_id)
    is_text = file.details.mime_type.lower().startswith("text/")
    return Source(pieces=services.files.read(file), size=file.size, check_utf8=is_text)


async def named_file(services: Services, caller: str, file_id: str) -> FileRecord:
    """A file of this caller that can be read as a document.

    Raises: NotFound, BadRequest for an empty one, TooLarge.
    """
    try:
        file = await services.files.files.get(caller, file_id)
    except NotFound as error:
        raise NotFound(error.message, param="file_id") from None
    if not file.size:
        raise BadRequest("the file is empty; name one with a text", code=Code.EMPTY_INPUT, param="file_id")
    if file.size > services.settings.body_bytes:
        raise TooLarge(f"the file has {file.size} bytes; a document may have {services.settings.body_bytes}")
    return file


async def whole_body(source: Source, body: RequestBody) -> AsyncIterator[bytes]:
    """The document as it arrives, checked.

    Raises: ServiceError, ClientGone.
    """
    if source.text is not None:
        yield source.text
        return
    check = Utf8Check() if source.check_utf8 else None
    chunks = body.chunks() if source.pieces is None else source.pieces
    async with aclosing(chunks):  # a file also when it is given up in the middle
        async for chunk in chunks:
            if check is not None:
                check.push(chunk)
            yield chunk
    if check is not None:
        check.push(b"", final=True)


def no_words(_: ServiceError) -> None:
    """The last words of a format that has none for an error."""
