"""/v1/uploads: resumable uploads, by tus 1.0 (tus.io)."""

import re
from contextlib import suppress

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from dist_attn_api.types import Upload
from dist_attn_service.base.errors import BadRequest, Code, ServiceError, TooLarge
from dist_attn_service.base.parsing import validated
from dist_attn_service.http.exchange import while_connected
from dist_attn_service.routers.files import details_of, file_object
from dist_attn_service.routers.incoming import Asked, Incoming, json_response, wrong_type
from dist_attn_service.routers.openapi import ANY_BYTES, described, header
from dist_attn_service.schemas.base import MOST
from dist_attn_service.schemas.stored import UploadRequest
from dist_attn_service.uploads import tus
from dist_attn_service.uploads.catalogue import Notes
from dist_attn_service.uploads.ledger import UploadRecord

router = APIRouter(tags=["uploads"])
FILE_ID = "Upload-File-Id"
_COUNT = {"type": "integer", "minimum": 0, "maximum": MOST}


@router.options("/v1/uploads", summary="What of tus is offered", response_class=Response, status_code=204)
async def describe_uploads(asked: Asked) -> Response:
    """The version and the extensions of tus, and the size of the largest file, as headers."""
    headers = {
        "Tus-Version": tus.VERSION,
        "Tus-Extension": tus.EXTENSIONS,
        "Tus-Max-Size": str(asked.services.settings.files.file_bytes),
        tus.RESUMABLE: tus.VERSION,
    }
    return Response(status_code=204, headers=headers)


@router.post(
    "/v1/uploads",
    response_model=Upload,
    summary="Begin an upload",
    description="From JSON; or as tus has it, where the header Upload-Length is given: then the answer is a 201.",
    responses={201: {"model": Upload, "description": "The upload, begun as tus clients do."}},
    openapi_extra=described(
        UploadRequest,
        required=False,
        content={tus.OFFSET_STREAM: ANY_BYTES},
        parameters=[header(tus.LENGTH, _COUNT), header(tus.METADATA, {"type": "string"})],
    ),
)
async def create_upload(asked: Asked) -> Response:
    """Begin an upload of a stated number of bytes."""
    if tus.LENGTH in asked.headers or tus.RESUMABLE in asked.headers:
        return await _create_by_tus(asked)
    wanted = await asked.json(UploadRequest)
    catalogue, feed = asked.services.files.catalogue, await _feed(asked, wanted)
    name, record = await catalogue.begin(asked.caller, wanted.bytes, details_of(wanted), feed=feed)
    return json_response(await _upload(asked, name, record))


@router.get("/v1/uploads/{upload_id}", summary="One upload")
async def get_upload(asked: Asked, upload_id: str) -> Upload:
    """The status of an upload; a request that sends bytes to it is not disturbed."""
    return await _upload(asked, upload_id, await asked.services.files.catalogue.upload(asked.caller, upload_id))


@router.head("/v1/uploads/{upload_id}", summary="Where to go on", response_class=Response)
async def head_upload(asked: Asked, upload_id: str) -> Response:
    """The number of bytes received, in Upload-Offset, and the position of a session that the upload feeds."""
    tus.check_version(asked.headers)
    files = asked.services.files
    record = await files.standing(asked.caller, upload_id)
    headers = _progress(record, await files.offset(record)) | {tus.LENGTH: str(record.length)}
    if record.metadata:
        headers[tus.METADATA] = record.metadata
    return Response(headers=headers | await _session_headers(asked, upload_id, record))


@router.patch(
    "/v1/uploads/{upload_id}",
    summary="Go on with an upload",
    response_class=Response,
    status_code=204,
    openapi_extra=described(
        content={tus.OFFSET_STREAM: ANY_BYTES}, parameters=[header(tus.OFFSET, _COUNT, required=True)]
    ),
)
async def patch_upload(asked: Asked, upload_id: str) -> Response:
    """Append the next bytes; the last of them makes the file. All that has arrived is kept, however the request ends.

    If the upload feeds a session, the last bytes are answered when the session has read the text to its end.
    """
    tus.check_version(asked.headers)
    _check_stream(asked)
    offset = tus.parse_count(asked.headers, tus.OFFSET)
    record, end = await _append(asked, upload_id, offset)
    headers = _progress(record, end) | await _session_headers(asked, upload_id, record)
    return Response(status_code=204, headers=headers)


@router.delete("/v1/uploads/{upload_id}", summary="Forget an upload", response_class=Response, status_code=204)
async def delete_upload(asked: Asked, upload_id: str) -> Response:
    """Remove an upload and its bytes; a file that it has become stays."""
    tus.check_version(asked.headers)
    await asked.services.files.catalogue.delete_upload(asked.caller, upload_id)
    return Response(status_code=204, headers={tus.RESUMABLE: tus.VERSION})


async def _create_by_tus(asked: Incoming) -> Response:
    """Begin an upload by tus's creation, which may bring the first bytes.

    Raises: BadRequest naming the header, what the upload raises.
    """
    tus.check_version(asked.headers)
    length = tus.parse_count(asked.headers, tus.LENGTH)
    metadata = asked.headers.get(tus.METADATA, "")
    wanted = _described(length, tus.parse_metadata(metadata))
    with_bytes = asked.headers.get("content-type") is not None
    if with_bytes:
        _check_stream(asked)
    catalogue, feed = asked.services.files.catalogue, await _feed(asked, wanted)
    name, record = await catalogue.begin(asked.caller, length, details_of(wanted), metadata, feed)
    end = 0
    if with_bytes or length == 0:
        record, end = await _append(asked, name, 0)
    headers = _progress(record, end) | {"Location": f"/v1/uploads/{name}"}
    headers |= await _session_headers(asked, name, record)
    return json_response(await _upload(asked, name, record), status=201, headers=headers)


def _described(length: int, metadata: dict[str, str]) -> UploadRequest:
    """The metadata of tus clients as the JSON request that says the same.

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
    return validated(UploadRequest, values)


def _number(text: str | None) -> int | str | None:
    """Turn digits into a number; anything else is left for the check of its field to refuse."""
    return int(text) if text and re.fullmatch("[0-9]{1,16}", text) else text


async def _feed(asked: Incoming, wanted: UploadRequest) -> Notes | None:
    """The notes on the session that an upload shall feed, None without one.

    Raises: BadRequest, NotFound; ServiceError (409) when the session has another position than expected.
    """
    if wanted.session_id is None:
        if wanted.expected_position is not None:
            raise BadRequest("expected_position is that of a session; name the session too", param="expected_position")
        return None
    services = asked.services
    services.context_for(None, "sessions")
    if not wanted.bytes:
        raise BadRequest(
            "an upload that feeds a session has at least one byte", code=Code.EMPTY_INPUT, param="session_id"
        )
    if wanted.bytes > services.settings.body_bytes:
        raise TooLarge(f"a text may have {services.settings.body_bytes} bytes; this one has {wanted.bytes}")
    is_text = wanted.mime_type.lower().startswith("text/")
    feed = await services.feeds.wanted(asked.caller, wanted.session_id, wanted.expected_position, is_text=is_text)
    notes: Notes = msgspec.to_builtins(feed)
    return notes


async def _append(asked: Incoming, name: str, offset: int) -> tuple[UploadRecord, int]:
    services, caller, body = asked.services, asked.caller, asked.body
    announced = asked.length()
    with asked.place():
        if (await services.files.catalogue.upload(caller, name)).feed is None:
            return await services.files.append(caller, name, offset, body, announced)
        feed = await services.feeds.begin(caller, name)
        with feed.sending():
            record, end = await services.files.append(caller, name, offset, body, announced, feed)
            if record.state == "completed":
                await while_connected(body, feed.finished())
        return await services.files.catalogue.upload(caller, name), end


async def _session_headers(asked: Incoming, name: str, record: UploadRecord) -> dict[str, str]:
    """The headers about the session that an upload feeds."""
    if record.feed is None:
        return {}
    session = await asked.services.feeds.standing(asked.caller, name, record)
    return {
        "Upload-Session": session.id,
        "Upload-Session-State": session.state,
        "Upload-Session-Start": str(session.start),
        "Upload-Session-Position": str(session.position),
        "Upload-Session-Checkpoint": str(session.checkpoint),
    }


def _check_stream(asked: Incoming) -> None:
    kind = asked.media_type()
    if kind != tus.OFFSET_STREAM:
        raise wrong_type(kind, f"needed is {tus.OFFSET_STREAM}")


def _progress(record: UploadRecord, offset: int) -> dict[str, str]:
    """The headers about the progress of an upload."""
    headers = {
        tus.RESUMABLE: tus.VERSION,
        tus.OFFSET: str(offset),
        "Upload-Expires": tus.http_date(record.expires_at),
        "Cache-Control": "no-store",
    }
    return headers | ({FILE_ID: record.file} if record.file else {})


async def _upload(asked: Incoming, name: str, record: UploadRecord) -> Upload:
    """An upload as its owner sees it, with the file that was made of it while that is there."""
    files, feeds, file = asked.services.files, asked.services.feeds, None
    if record.file:
        with suppress(ServiceError):  # it was deleted since
            file = file_object(record.file, await files.catalogue.file(asked.caller, record.file))
    return Upload(
        id=name,
        bytes=record.length,
        received_bytes=await files.offset(record),
        created_at=int(record.made_at),
        expires_at=int(record.expires_at),
        filename=record.details.filename,
        purpose=record.details.purpose,
        mime_type=record.details.mime_type,
        status="completed" if record.file else "pending",
        file=file,
        session=None if record.feed is None else await feeds.standing(asked.caller, name, record),
    )
