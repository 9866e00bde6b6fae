"""/v1/files: OpenAI's files, sent as forms that stream to disk, listed in pages, read in ranges."""

from contextlib import aclosing
from urllib.parse import quote

from fastapi import APIRouter
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dist_attn_service.base.errors import BadRequest, ClientGone, ServiceError
from dist_attn_service.base.parsing import parse_query, refuse
from dist_attn_service.dependencies import Services, caller_of, content_length, form_boundary, record_of, services_of
from dist_attn_service.http.exchange import ResponseWriter
from dist_attn_service.schemas.files import (
    ExpiresAfter,
    FileDeleted,
    FileList,
    FileListOptions,
    FileObject,
    UploadRequest,
)
from dist_attn_service.uploads.entries import Details, FileRecord
from dist_attn_service.uploads.ranges import byte_range
from dist_attn_service.uploads.writing import Form

__all__ = ["details_of", "file_object", "router"]

router = APIRouter(tags=["files"])
BINARY = "application/octet-stream"
ANCHOR, SECONDS = "expires_after[anchor]", "expires_after[seconds]"
FORM = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": UploadRequest.model_json_schema()["properties"]["purpose"],
        ANCHOR: {"type": "string", "enum": ["created_at"]},
        SECONDS: {"type": "integer", "minimum": 3600, "maximum": 2_592_000},
    },
    "additionalProperties": False,
    "dependentRequired": {ANCHOR: [SECONDS], SECONDS: [ANCHOR]},
}


def file_object(name: str, record: FileRecord) -> FileObject:
    """A file as its owner sees it."""
    return FileObject(
        id=name,
        bytes=record.size,
        created_at=int(record.made_at),
        expires_at=int(record.expires_at) if record.expires_at else None,
        filename=record.details.filename,
        purpose=record.details.purpose,
        mime_type=record.details.mime_type,
    )


def details_of(wanted: UploadRequest) -> Details:
    """What a client says of a file."""
    lives = wanted.expires_after.seconds if wanted.expires_after else 0
    return Details(wanted.filename, wanted.mime_type, wanted.purpose, float(lives))


@router.post(
    "/v1/files",
    response_model=FileObject,
    summary="Upload a file",
    openapi_extra={"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": FORM}}}},
)
async def create_file(request: Request) -> Response:
    """Write the file of a form to disk while it arrives."""
    services = services_of(request)
    boundary = form_boundary(request)
    with services.open_requests.one(record_of(request).holder):
        name, record = await services.files.add_file(
            caller_of(request),
            boundary,
            services.body(request),
            content_length(request, services.settings.files.file_bytes),
            ("purpose", ANCHOR, SECONDS),
            _details,
        )
    return Response(file_object(name, record).model_dump_json(), media_type="application/json")


@router.get(
    "/v1/files",
    response_model=FileList,
    summary="List files",
    openapi_extra={
        "parameters": [
            {"name": name, "in": "query", "required": False, "schema": schema}
            for name, schema in FileListOptions.model_json_schema()["properties"].items()
        ]
    },
)
async def list_files(request: Request) -> Response:
    """A page of the caller's files, the newest first unless it is asked otherwise."""
    services = services_of(request)
    wanted = parse_query(request.query_params.multi_items(), FileListOptions)
    found, more = await services.files.files.page(
        caller_of(request), after=wanted.after, limit=wanted.limit, order=wanted.order, purpose=wanted.purpose
    )

    def written() -> str:
        data = [file_object(name, record) for name, record in found]
        first, last = (data[0].id, data[-1].id) if data else (None, None)
        return FileList(data=data, first_id=first, last_id=last, has_more=more).model_dump_json()

    return Response(await services.beside(written), media_type="application/json")


@router.get("/v1/files/{file_id}", response_model=FileObject, summary="One file")
async def get_file(request: Request, file_id: str) -> FileObject:
    """What is known of a file."""
    return file_object(file_id, await services_of(request).files.files.get(caller_of(request), file_id))


@router.delete("/v1/files/{file_id}", response_model=FileDeleted, summary="Delete a file")
async def delete_file(request: Request, file_id: str) -> FileDeleted:
    """Remove a file and its bytes."""
    await services_of(request).files.files.delete(caller_of(request), file_id)
    return FileDeleted(id=file_id)


@router.get(
    "/v1/files/{file_id}/content",
    summary="The bytes of a file",
    response_class=Response,
    openapi_extra={
        "parameters": [{"name": "Range", "in": "header", "required": False, "schema": {"type": "string"}}],
        "responses": {
            "200": {"description": "All bytes.", "content": {BINARY: {"schema": {"type": "string"}}}},
            "206": {
                "description": "The range that was asked for.",
                "content": {BINARY: {"schema": {"type": "string"}}},
            },
        },
    },
)
async def get_file_content(request: Request, file_id: str) -> Response:
    """All bytes of a file, or a range of them."""
    services = services_of(request)
    record = await services.files.files.get(caller_of(request), file_id)
    return _FileContent(services, request, file_id, record)


class _FileContent(Response):
    """Bytes of a file, as fast as the client takes them; an answer that cannot be whole breaks off."""

    def __init__(self, services: Services, request: Request, name: str, record: FileRecord) -> None:
        super().__init__()
        self._services, self._record, self._log = services, record, record_of(request)
        self._body = services.body(request)
        etag = f'"{name}"'
        same = request.headers.get("if-range", etag) == etag
        part = byte_range(request.headers.get("range"), record.size) if same else None
        self._start, self._stop = part or (0, record.size)
        self._code = 206 if part else 200
        self._more = {
            "accept-ranges": "bytes",
            "etag": etag,
            # whatever a client called it, a browser neither shows nor runs it
            "content-disposition": f"attachment; filename*=UTF-8''{quote(record.details.filename, safe='')}",
            "x-content-type-options": "nosniff",
        }
        if part:
            self._more["content-range"] = f"bytes {self._start}-{self._stop - 1}/{record.size}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises: ServiceError as long as nothing has been sent."""
        writer = ResponseWriter(send, self._body, stall_seconds=self._services.settings.client_stall_seconds)
        try:
            with self._services.open_requests.one(self._log.holder):
                await writer.start(BINARY, self._stop - self._start, more=self._more, status=self._code)
                async with aclosing(self._services.files.read(self._record, self._start, self._stop)) as pieces:
                    async for piece in pieces:
                        await writer.write(piece)
                await writer.finish()
            await writer.close()
        except ClientGone:
            self._log.reason = "client_gone"
        except ServiceError as error:
            if not writer.started:
                raise
            # the connection ends before the announced length: nobody takes it for whole
            self._log.reason = str(error.code)


def _details(form: Form) -> Details:
    """The fields of a form as the JSON of an upload would say them.

    Raises: BadRequest naming the field.
    """
    assert form.file is not None
    values: dict[str, object] = {
        "bytes": 0,
        "filename": form.file.filename or "upload",
        "mime_type": form.file.content_type or BINARY,
    }
    if "purpose" in form.values:
        values["purpose"] = form.values["purpose"]
    try:
        if ANCHOR in form.values or SECONDS in form.values:
            seconds = form.values.get(SECONDS, "")
            if not (seconds.isascii() and seconds.isdigit() and len(seconds) < 10):
                raise BadRequest(f"{SECONDS} is {seconds[:40]!r}; a number of seconds was needed", param=SECONDS)
            after = {"anchor": form.values.get(ANCHOR), "seconds": int(seconds)}
            try:
                values["expires_after"] = ExpiresAfter.model_validate(after)
            except ValidationError as error:
                raise refuse(error.errors(include_url=False, include_context=False), ExpiresAfter) from None
        return details_of(UploadRequest.model_validate(values))
    except ValidationError as error:
        raise refuse(error.errors(include_url=False, include_context=False), UploadRequest) from None
