"""A request as the routes get it: the services, its body as JSON or as a document, and the ways to answer."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Set
from contextlib import AbstractContextManager, aclosing
from functools import cached_property
from typing import Annotated, Any, TypeVar, final

import msgspec
import numpy as np
from fastapi import Depends
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from dist_attn.text.documents import Section
from dist_attn.text.plain import HEAD_BYTES, extracted_as, only_names_html
from dist_attn_service.base.errors import BadRequest, Code, NotFound, ServiceError, TooLarge
from dist_attn_service.base.logs import RequestRecord
from dist_attn_service.base.parsing import RequestTerms, parse_json, parse_query, terms_of, utf8
from dist_attn_service.dependencies import Services
from dist_attn_service.encodings.documents import DocumentSource
from dist_attn_service.http.exchange import RequestBody, ResponseWriter, StreamedResponse
from dist_attn_service.routers.openapi import ANY_BYTES, ANY_TEXT, BYTES, FORM, JSON, TEXT, form
from dist_attn_service.schemas.completions import HowSoon
from dist_attn_service.text.text_check import TextCheck, refuse_other, utf8_checked
from dist_attn_service.text.tokenising import cut
from dist_attn_service.uploads.catalogue import TEXT as OF_DOCUMENT
from dist_attn_service.uploads.ledger import FileRecord
from dist_attn_service.uploads.multipart import FieldStart, FormParser, boundary_of

M = TypeVar("M", bound=BaseModel)
DOCUMENTS = {TEXT: ANY_TEXT, BYTES: ANY_BYTES, **form("file", file=ANY_BYTES["schema"])}
"""The bodies that are documents, for the OpenAPI document."""
MARKDOWN = "text/markdown"
GZIP = ("gzip", "x-gzip")
FORM_BYTES = 512 << 10  # the most that a form's heads and short values take beside its file


@final
class Incoming:
    """One request, and the services that answer it."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.headers = request.headers
        self.services: Services = request.state.services
        self.record: RequestRecord = request.state.record
        self.caller = self.record.caller

    def place(self) -> AbstractContextManager[None]:
        """Take one of the places of open requests while the block runs. Raises: ServiceError when none is free."""
        return self.services.open_requests.one(self.record.holder)

    # ---- its body ------------------------------------------------------------------------------

    @cached_property
    def body(self) -> RequestBody:
        """The one owner of the request's `receive`."""
        idle = self.services.settings.body_idle_seconds
        body = RequestBody(self.request.receive, idle_seconds=idle, gzip=self._coding in GZIP)
        self.record.received = lambda: body.bytes
        return body

    @property
    def _coding(self) -> str:
        return self.headers.get("content-encoding", "identity").strip().lower()

    def media_type(self, *, gzip: bool = False) -> str:
        """The body's media type in lower case, empty when none is given; it may be compressed where `gzip` says so.

        Raises: ServiceError (415) for another compressed body, BadRequest for a charset other than UTF-8.
        """
        coding = self._coding
        if coding not in ("identity", "") and not (gzip and coding in GZIP):
            raise ServiceError(
                f"Content-Encoding: {coding[:40]} is not offered; send the body as it is" + ", or in gzip" * gzip,
                code=Code.UNSUPPORTED_MEDIA_TYPE,
            )
        kind, _, parameters = self.headers.get("content-type", "").partition(";")
        for parameter in parameters.split(";"):
            name, _, value = parameter.strip().partition("=")
            if name.lower() == "charset" and value.strip('"').lower() not in ("utf-8", "utf8", "us-ascii"):
                raise BadRequest(
                    f"charset {value[:40]} is not offered; convert the text to UTF-8",
                    code=Code.UNSUPPORTED_MEDIA_TYPE,
                    status=400,
                )
        return kind.strip().lower()

    def form_boundary(self) -> bytes:
        """The boundary of a form.

        Raises: ServiceError (415) for a body of another media type, BadRequest for a boundary that is not valid.
        """
        kind = self.media_type()
        if kind != FORM:
            raise wrong_type(kind, f"send a form, as with curl -F, in {FORM}")
        return boundary_of(self.headers.get("content-type", ""))

    def length(self, limit: int | None = None, what: str = "what it holds", *, form: bool = False) -> int | None:
        """The number of bytes that Content-Length declares, None without it.

        Raises: TooLarge for more than `limit`, the limit of `what`; a form may have some bytes more than its file.
        """
        value = self.headers.get("content-length", "")
        if not (value.isascii() and value.isdecimal() and len(value) <= 20):
            return None
        length = int(value)
        if limit is not None and length > limit + FORM_BYTES * form:
            raise TooLarge(f"the body has {length} bytes; {what} may have {limit}")
        return length

    async def whole(self) -> bytes:
        """Read all bytes of a body, which may have as many as a JSON body.

        Raises: TooLarge, ServiceError (429) when such bodies of all requests take too much memory.
        """
        hold = self.services.json_memory.hold(self.record.holder, self.record.at_end.append)
        return await self.body.read_all(self.services.settings.json_body_bytes, hold)

    async def json(self, kind: type[M]) -> M:
        """Read the body as JSON of this kind. Raises: ServiceError for a body that is not, or is too long."""
        media_type = self.media_type(gzip=True)
        if media_type not in (JSON, "") and not media_type.endswith("+json"):
            raise wrong_type(media_type, f"send JSON with -H 'Content-Type: {JSON}'")
        self.length(self.services.settings.json_body_bytes, "a JSON body")
        return parse_json(await self.whole(), kind)

    async def options(self, kind: type[M]) -> M:
        """Read the body as JSON; one that is left out has all defaults. Raises: as `json`."""
        if self.headers.get("content-length", "0") == "0" and "transfer-encoding" not in self.headers:
            return parse_json(b"{}", kind)
        return await self.json(kind)

    # ---- the rest ------------------------------------------------------------------------------

    def terms(self, body: HowSoon | None = None) -> RequestTerms:
        """The priority and deadline, by the body or else the headers. Raises: BadRequest, ServiceError (403)."""
        return terms_of(body, self.headers, may_hurry=self.record.may_hurry, holder=self.record.holder)

    def query(self, kind: type[M]) -> M:
        """The options in the query. Raises: BadRequest naming the option."""
        return parse_query(self.request.query_params.multi_items(), kind)

    def streamed(
        self, write: Callable[[ResponseWriter], Awaitable[None]], last_words: Callable[[ServiceError], bytes | None]
    ) -> StreamedResponse:
        """A response by `write`, in its own place; `last_words` gives the end for a later error, None to break off."""

        async def exchange(writer: ResponseWriter) -> None:
            with self.place():
                await write(writer)

        stall = self.services.settings.client_stall_seconds
        return StreamedResponse(exchange, self.body, self.record, last_words=last_words, stall_seconds=stall)


async def incoming(request: Request) -> Incoming:
    """Make the `Incoming` of a request: a coroutine, as FastAPI runs plain functions in threads."""
    return Incoming(request)


Asked = Annotated[Incoming, Depends(incoming)]


def json_response(value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A value of `dist_attn_api.types` as an answer."""
    return Response(msgspec.json.encode(value), status_code=status, headers=headers, media_type=JSON)


def wrong_type(kind: str, needed: str) -> ServiceError:
    """The error for a body of another media type than those that are needed."""
    return ServiceError(f"Content-Type is {kind[:80]!r}; {needed}", code=Code.UNSUPPORTED_MEDIA_TYPE)


def no_error_trailer(_: ServiceError) -> None:
    """Give no last words: the format of the answer has none for an error."""


# ---- documents -----------------------------------------------------------------------------------


def document_source(asked: Incoming) -> DocumentSource:
    """The source of a body that is a document itself, or a form with one as its file.

    Raises: ServiceError (415) for a type of no document, BadRequest for a boundary that is not valid, TooLarge for a
        declared length over the limit.
    """
    kind, body, text_of = asked.media_type(gzip=True), asked.body, asked.services.extraction.text_of
    if kind not in (TEXT, MARKDOWN, BYTES, FORM, "") and not extracted_as(b"", kind):
        refuse_other(b"", kind)
        others = f"{BYTES} (any bytes), {JSON}, or a form (curl -F file=@book.txt)"
        raise wrong_type(kind, f"send -H 'Content-Type: {TEXT}' (UTF-8), {others}")
    length = asked.length(asked.services.settings.body_bytes, "a document", form=kind == FORM)
    size = None if body.gzip else length
    if kind == BYTES:
        return DocumentSource(body.chunks(), size=size)
    if kind == FORM:
        pieces = _file_of_form(body.chunks(), boundary_of(asked.headers.get("content-type", "")))
    else:
        pieces = _text(body.chunks(), kind)
    sections: list[Section] = []
    return DocumentSource(text_of(pieces, sections), size=size, sections=sections)


async def _text(chunks: AsyncGenerator[bytes], kind: str) -> AsyncGenerator[bytes]:
    """A body of text, checked as it comes.

    Raises: as `TextCheck`.
    """
    check = TextCheck(kind, others=True)
    async with aclosing(chunks):
        async for chunk in chunks:
            if data := check.push(chunk):
                yield data
    if data := check.push(b"", final=True):
        yield data


async def _file_of_form(chunks: AsyncGenerator[bytes], boundary: bytes) -> AsyncGenerator[bytes]:
    """The one file of a form, checked as it comes; clients send application/octet-stream for what they do not know.

    Raises: BadRequest for a form without exactly one file; as `TextCheck`.
    """
    parser, check = FormParser(boundary), None
    async with aclosing(chunks):
        async for chunk in chunks:
            for event in parser.push(chunk):
                if isinstance(event, FieldStart):
                    check = _begin_file(event, check)
                elif check is not None and (data := check.push(event)):
                    yield data
    parser.finish()
    if check is None:
        raise BadRequest(
            "the form has no file; send one, as with curl -F file=@book.txt", code=Code.MISSING_PARAMETER, param="file"
        )
    if data := check.push(b"", final=True):
        yield data


def _begin_file(start: FieldStart, before: TextCheck | None) -> TextCheck:
    """Begin the check of a form's file.

    Raises: BadRequest for another field or a second file; as `TextCheck`.
    """
    if start.filename is None:
        raise BadRequest(
            f"the form has a field {start.name[:80]!r} beside its file; send options in the query, like ?window=512",
            code=Code.UNKNOWN_PARAMETER,
            param=start.name[:80],
        )
    if before is not None:
        raise BadRequest("the form has more than one file; send one document at a time", param="file")
    return TextCheck(start.content_type.partition(";")[0].strip().lower(), others=True)


async def named_source(asked: Incoming, text: str | None, file_id: str | None) -> DocumentSource:
    """The document of a JSON body: the text in it, or the file that it names.

    Raises: BadRequest unless it has exactly one of them, and for an empty one; NotFound, TooLarge.
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
        return DocumentSource(cut(data, asked.services.settings.piece_bytes), size=len(data))
    if text is not None:
        raise BadRequest("input and file_id are two documents; send one of them", param="file_id")
    file = await named_file(asked, file_id)
    pieces = asked.services.files.read(file.segments, 0, file.size)
    is_text = file.details.mime_type.lower().startswith("text/")
    sections = await asked.services.files.sections(file)
    return DocumentSource(utf8_checked(pieces) if is_text else pieces, stored=True, size=file.size, sections=sections)


def check_boundaries(boundaries: list[int], named: Set[str], source: DocumentSource) -> None:
    """Check boundaries.

    Raises: BadRequest if they do not rise, lie outside the document, or go with another option of `named`.
    """
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
    """Find a file of this caller that can be read as a document, or else the file of its text, which is made first.

    Raises: NotFound, BadRequest for an empty one, ServiceError (415) for one of which no text can be had, TooLarge.
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
    if file_id.endswith(OF_DOCUMENT):  # whatever it begins with
        return file
    async with aclosing(services.files.read(file.segments, 0, min(HEAD_BYTES, file.size))) as pieces:
        head = b"".join([piece async for piece in pieces])
    kind = file.details.mime_type.lower()
    if not extracted_as(head) or only_names_html(head, kind):
        refuse_other(head, kind)
        return file
    return await services.files.text_file(asked.caller, file_id, file, services.extraction.text_of)
