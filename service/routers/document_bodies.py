"""A document as the body of a request, for routes that encode it now or later."""

from collections.abc import AsyncIterator, Sequence
from typing import Any

from pydantic import BaseModel
from starlette.requests import Request

from service.dependencies import Services, media_type
from service.documents import Source
from service.errors import Code, ServiceError, TooLarge
from service.exchange import RequestBody
from service.text_check import Utf8Check

__all__ = ["JSON", "document_source", "no_words", "query_parameters", "whole_body"]

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


async def whole_body(source: Source, body: RequestBody) -> AsyncIterator[bytes]:
    """The document as it arrives, checked.

    Raises: ServiceError, ClientGone.
    """
    if source.text is not None:
        yield source.text
        return
    check = Utf8Check() if source.check_utf8 else None
    async for chunk in body.chunks() if source.pieces is None else source.pieces:
        if check is not None:
            check.push(chunk)
        yield chunk
    if check is not None:
        check.push(b"", final=True)


def no_words(_: ServiceError) -> None:
    """The last words of a format that has none for an error."""
