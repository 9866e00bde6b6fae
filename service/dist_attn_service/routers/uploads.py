"""/v1/uploads: OpenAI's uploads in parts, and resumable uploads (tus) on the same resource."""

import re
from typing import Any

from fastapi import APIRouter
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

from dist_attn_service.base.errors import BadRequest, Code, ServiceError, TooLarge
from dist_attn_service.base.parsing import parse_json, refuse
from dist_attn_service.dependencies import (
    Services,
    caller_of,
    content_length,
    form_boundary,
    media_type,
    read_json_body,
    record_of,
    services_of,
)
from dist_attn_service.http.exchange import while_connected
from dist_attn_service.routers.files import details_of, file_object
from dist_attn_service.schemas.files import (
    CompleteUploadRequest,
    UploadObject,
    UploadPart,
    UploadRequest,
    UploadSession,
)
from dist_attn_service.uploads import tus
from dist_attn_service.uploads.entries import FeedRecord, UploadRecord

__all__ = ["router"]

router = APIRouter(tags=["uploads"])
JSON_BODY: dict[str, Any] = {"required": True}
FILE_ID = "Upload-File-Id"


def _json(name: str) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}
    return {"requestBody": {"required": True, "content": content}}


def _header(name: str, kind: str, *, required: bool) -> dict[str, Any]:
    schema = {"type": kind} | ({"minimum": 0, "maximum": 1 << 53} if kind == "integer" else {})
    return {"name": name, "in": "header", "required": required, "schema": schema}


@router.options("/v1/uploads", summary="What of tus is offered", response_class=Response, status_code=204)
async def describe_uploads(request: Request) -> Response:
    """The version, the extensions and the largest file."""
    headers = {
        "Tus-Version": tus.VERSION,
        "Tus-Extension": tus.EXTENSIONS,
        "Tus-Max-Size": str(services_of(request).settings.files.file_bytes),
        tus.RESUMABLE: tus.VERSION,
    }
    return Response(status_code=204, headers=headers)


@router.post(
    "/v1/uploads",
    response_model=UploadObject,
    summary="Begin an upload",
    description="OpenAI's, from JSON; or tus's, where the header Upload-Length is given: then the answer is a 201.",
    responses={201: {"model": UploadObject, "description": "The upload, begun as tus clients do."}},
    openapi_extra={
        "requestBody": {
            "required": False,
            "content": {
                "application/json": {"schema": {"$ref": "#/components/schemas/UploadRequest"}},
                tus.OFFSET_STREAM: {"schema": {"type": "string", "format": "binary"}},
            },
        },
        "parameters": [
            _header(tus.LENGTH, "integer", required=False),
            _header(tus.METADATA, "string", required=False),
        ],
    },
)
async def create_upload(request: Request) -> Response:
    """Say how many bytes will come."""
    services = services_of(request)
    if tus.LENGTH in request.headers or tus.RESUMABLE in request.headers:
        return await _create_by_tus(request, services)
    limit = services.settings.json_body_bytes
    wanted = parse_json(await read_json_body(request, services.body(request), limit), UploadRequest)
    feed = await _feed(request, wanted)
    name, record = await services.files.catalogue.begin(caller_of(request), wanted.bytes, details_of(wanted), feed=feed)
    return await _answer(request, name, record)


@router.get("/v1/uploads/{upload_id}", response_model=UploadObject, summary="One upload")
async def get_upload(request: Request, upload_id: str) -> Response:
    """How an upload stands; who sends is not disturbed."""
    return await _answer(
        request, upload_id, await services_of(request).files.catalogue.upload(caller_of(request), upload_id)
    )


@router.head("/v1/uploads/{upload_id}", summary="Where to go on", response_class=Response)
async def head_upload(request: Request, upload_id: str) -> Response:
    """The byte that an upload stands at, in Upload-Offset; and where the session that it feeds stands."""
    tus.check_version(request.headers)
    shelf = services_of(request).files
    record = await shelf.standing(caller_of(request), upload_id)
    if record.state == "cancelled":
        raise ServiceError("the upload was cancelled", code=Code.CONFLICT, status=410)
    headers = _progress(record, await shelf.offset(record)) | {tus.LENGTH: str(record.length)}
    if record.metadata:
        headers[tus.METADATA] = record.metadata
    return Response(headers=headers | await _session_headers(request, upload_id, record))


@router.patch(
    "/v1/uploads/{upload_id}",
    summary="Go on with an upload",
    response_class=Response,
    status_code=204,
    openapi_extra={
        "parameters": [_header(tus.OFFSET, "integer", required=True)],
        "requestBody": {
            "required": True,
            "content": {tus.OFFSET_STREAM: {"schema": {"type": "string", "format": "binary"}}},
        },
    },
)
async def patch_upload(request: Request, upload_id: str) -> Response:
    """The next bytes; the last of them makes the file. What has arrived is kept, however the request ends.

    Of an upload that feeds a session the last bytes are answered when the session stands at the end of the text.
    """
    tus.check_version(request.headers)
    _check_stream(request)
    offset = tus.parse_count(request.headers, tus.OFFSET)
    record, end = await _append(request, upload_id, offset)
    headers = _progress(record, end) | await _session_headers(request, upload_id, record)
    return Response(status_code=204, headers=headers)


@router.delete("/v1/uploads/{upload_id}", summary="Forget an upload", response_class=Response, status_code=204)
async def delete_upload(request: Request, upload_id: str) -> Response:
    """Remove an upload and what has come of it; a file that was made of it stays."""
    tus.check_version(request.headers)
    await services_of(request).files.catalogue.delete_upload(caller_of(request), upload_id)
    return Response(status_code=204, headers={tus.RESUMABLE: tus.VERSION})


@router.post(
    "/v1/uploads/{upload_id}/parts",
    response_model=UploadPart,
    summary="Add a part",
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {
                "multipart/form-data": {
                    "schema": {
                        "type": "object",
                        "required": ["data"],
                        "additionalProperties": False,
                        "properties": {"data": {"type": "string", "format": "binary"}},
                    }
                }
            },
        }
    },
)
async def create_part(request: Request, upload_id: str) -> UploadPart:
    """Write a part to disk while it arrives."""
    services = services_of(request)
    boundary = form_boundary(request)
    with services.open_requests.one(record_of(request).holder):
        part, made = await services.files.add_part(
            caller_of(request),
            upload_id,
            boundary,
            services.body(request),
            content_length(request, services.settings.files.part_bytes),
        )
    return UploadPart(id=part, created_at=int(made), upload_id=upload_id)


@router.post(
    "/v1/uploads/{upload_id}/complete",
    response_model=UploadObject,
    summary="Make a file of parts",
    openapi_extra=_json("CompleteUploadRequest"),
)
async def complete_upload(request: Request, upload_id: str) -> Response:
    """The parts in the order in which they are named, once their bytes are as many as were announced."""
    services = services_of(request)
    limit = services.settings.json_body_bytes
    wanted = parse_json(await read_json_body(request, services.body(request), limit), CompleteUploadRequest)
    record = await services.files.complete(caller_of(request), upload_id, wanted.part_ids, wanted.md5)
    return await _answer(request, upload_id, record)


@router.post("/v1/uploads/{upload_id}/cancel", response_model=UploadObject, summary="Cancel an upload")
async def cancel_upload(request: Request, upload_id: str) -> Response:
    """Forget what has come; the upload takes nothing any more."""
    return await _answer(
        request, upload_id, await services_of(request).files.catalogue.cancel(caller_of(request), upload_id)
    )


async def _create_by_tus(request: Request, services: Services) -> Response:
    """tus's creation, perhaps with the first bytes.

    Raises: BadRequest naming the header, what the upload raises.
    """
    tus.check_version(request.headers)
    length = tus.parse_count(request.headers, tus.LENGTH)
    metadata = request.headers.get(tus.METADATA, "")
    wanted = _told(length, tus.parse_metadata(metadata))
    with_bytes = request.headers.get("content-type") is not None
    if with_bytes:
        _check_stream(request)
    caller = caller_of(request)
    feed = await _feed(request, wanted)
    name, record = await services.files.catalogue.begin(caller, length, details_of(wanted), metadata, feed)
    end = 0
    if with_bytes or length == 0:
        record, end = await _append(request, name, 0)
    headers = _progress(record, end) | {"Location": f"/v1/uploads/{name}"}
    headers |= await _session_headers(request, name, record)
    return await _answer(request, name, record, status=201, headers=headers)


def _told(length: int, metadata: dict[str, str]) -> UploadRequest:
    """What the metadata of tus clients say, in the words of the JSON form.

    Raises: BadRequest naming Upload-Metadata's key.
    """
    values = {
        "bytes": length,
        "filename": metadata.get("filename") or metadata.get("name") or "upload",
        "mime_type": metadata.get("filetype") or metadata.get("type") or "application/octet-stream",
        "purpose": metadata.get("purpose") or "user_data",
        "session_id": metadata.get("session") or None,
        "expected_position": _number(metadata.get("expected_position")),
    }
    try:
        return UploadRequest.model_validate(values)
    except ValidationError as error:
        raise refuse(error.errors(include_url=False, include_context=False), UploadRequest) from None


def _number(text: str | None) -> int | str | None:
    """Digits as a number; anything else is refused later, in the words for its field."""
    return int(text) if text and re.fullmatch("[0-9]{1,16}", text) else text


async def _feed(request: Request, wanted: UploadRequest) -> FeedRecord | None:
    """The session that an upload shall feed, if it shall.

    Raises: BadRequest, NotFound; ServiceError (409) when it does not stand where it is expected to.
    """
    if wanted.session_id is None:
        if wanted.expected_position is not None:
            raise BadRequest("expected_position is that of a session; name the session too", param="expected_position")
        return None
    services = services_of(request)
    services.check_writes()
    if not wanted.bytes:
        raise BadRequest(
            "an upload that feeds a session has at least one byte", code=Code.EMPTY_INPUT, param="session_id"
        )
    if wanted.bytes > services.settings.body_bytes:
        raise TooLarge(f"a text may have {services.settings.body_bytes} bytes; this one has {wanted.bytes}")
    is_text = wanted.mime_type.lower().startswith("text/")
    return await services.feeds.wanted(caller_of(request), wanted.session_id, wanted.expected_position, is_text=is_text)


async def _append(request: Request, name: str, offset: int) -> tuple[UploadRecord, int]:
    services, caller = services_of(request), caller_of(request)
    body, announced = services.body(request), content_length(request)
    with services.open_requests.one(record_of(request).holder):
        if (await services.files.catalogue.upload(caller, name)).feed is None:
            return await services.files.append(caller, name, offset, body, announced)
        feed = await services.feeds.begin(caller, name)
        with feed.sending():
            record, end = await services.files.append(caller, name, offset, body, announced, feed)
            if record.state == "completed":
                await while_connected(body, feed.finished())
        return await services.files.catalogue.upload(caller, name), end


async def _session_headers(request: Request, name: str, record: UploadRecord) -> dict[str, str]:
    """Where the session stands that an upload feeds."""
    if record.feed is None:
        return {}
    stands = await services_of(request).feeds.standing(caller_of(request), name, record)
    return {
        "Upload-Session": stands.session,
        "Upload-Session-State": stands.state,
        "Upload-Session-Start": str(stands.start),
        "Upload-Session-Position": str(stands.position),
        "Upload-Session-Checkpoint": str(stands.checkpoint),
    }


def _check_stream(request: Request) -> None:
    kind = media_type(request)
    if kind != tus.OFFSET_STREAM:
        raise ServiceError(
            f"Content-Type is {kind[:80]!r}; needed is {tus.OFFSET_STREAM}",
            code=Code.UNSUPPORTED_MEDIA_TYPE,
        )


def _progress(record: UploadRecord, offset: int) -> dict[str, str]:
    """The headers that say where an upload stands."""
    headers = {
        tus.RESUMABLE: tus.VERSION,
        tus.OFFSET: str(offset),
        "Upload-Expires": tus.http_date(record.expires_at),
        "Cache-Control": "no-store",
    }
    return headers | ({FILE_ID: record.file} if record.file else {})


async def _answer(
    request: Request, name: str, record: UploadRecord, *, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """An upload as its owner sees it, with the file that was made of it while that is there."""
    shelf = services_of(request).files
    file = None
    if record.file:
        try:
            file = file_object(record.file, await shelf.files.get(caller_of(request), record.file))
        except ServiceError:
            file = None  # it was deleted since
    session = None
    if record.feed is not None:
        stands = await services_of(request).feeds.standing(caller_of(request), name, record)
        session = UploadSession(
            id=stands.session,
            state=stands.state,
            start=stands.start,
            position=stands.position,
            checkpoint=stands.checkpoint,
            error=stands.error or None,
        )
    answer = UploadObject(
        id=name,
        bytes=record.length,
        received_bytes=await shelf.offset(record),
        created_at=int(record.made_at),
        expires_at=int(record.expires_at),
        filename=record.details.filename,
        purpose=record.details.purpose,
        mime_type=record.details.mime_type,
        status=record.state,
        file=file,
        session=session,
    )
    return Response(answer.model_dump_json(), status_code=status, headers=headers, media_type="application/json")
