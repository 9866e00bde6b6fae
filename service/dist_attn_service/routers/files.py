"""/v1/files: OpenAI's files, sent as forms that stream to disk, listed in pages, read in ranges."""

from contextlib import aclosing
from typing import Any
from urllib.parse import quote

from fastapi import APIRouter
from starlette.responses import Response

from dist_attn_api.types import Deleted, File, FileList
from dist_attn_service.base.errors import BadRequest
from dist_attn_service.base.parsing import validated
from dist_attn_service.http.exchange import ResponseWriter, byte_range
from dist_attn_service.routers.incoming import Asked, json_response, no_error_trailer
from dist_attn_service.routers.openapi import ANY_BYTES, BYTES, answered, described, form, header, query_parameters
from dist_attn_service.schemas.stored import HOUR, MONTH, ExpiresAfter, FileListOptions, UploadRequest
from dist_attn_service.uploads.ledger import Details, FileRecord
from dist_attn_service.uploads.multipart import Form

router = APIRouter(tags=["files"])
ANCHOR, SECONDS = "expires_after[anchor]", "expires_after[seconds]"
_FIELDS: dict[str, Any] = {
    "file": ANY_BYTES["schema"],
    "purpose": UploadRequest.model_json_schema()["properties"]["purpose"],
    ANCHOR: {"type": "string", "enum": ["created_at"]},
    SECONDS: {"type": "integer", "minimum": HOUR, "maximum": MONTH},
}
FORM = form("file", "purpose", **_FIELDS)
FORM["multipart/form-data"]["schema"]["dependentRequired"] = {ANCHOR: [SECONDS], SECONDS: [ANCHOR]}


def file_object(name: str, record: FileRecord) -> File:
    """A file as its owner sees it."""
    return File(
        id=name,
        bytes=record.size,
        created_at=int(record.made_at),
        expires_at=int(record.expires_at) if record.expires_at else None,
        filename=record.details.filename,
        purpose=record.details.purpose,
        mime_type=record.details.mime_type,
    )


def details_of(wanted: UploadRequest) -> Details:
    """The details of a file, as a client gives them."""
    lives = wanted.expires_after.seconds if wanted.expires_after else 0
    return Details(wanted.filename, wanted.mime_type, wanted.purpose, float(lives))


@router.post("/v1/files", response_model=File, summary="Upload a file", openapi_extra=described(content=FORM))
async def create_file(asked: Asked) -> Response:
    """Write the file of a form to disk while it arrives."""
    files, boundary = asked.services.files, asked.form_boundary()
    with asked.place():
        length = asked.length(asked.services.settings.files.file_bytes, form=True)
        fields = ("purpose", ANCHOR, SECONDS)
        name, record = await files.add_file(asked.caller, boundary, asked.body, length, fields, _details)
    return json_response(file_object(name, record))


@router.get(
    "/v1/files",
    response_model=FileList,
    summary="List files",
    openapi_extra=described(parameters=query_parameters(FileListOptions)),
)
async def list_files(asked: Asked) -> Response:
    """A page of the caller's files, the newest first unless `order` says otherwise."""
    wanted = asked.query(FileListOptions)
    page, more = await asked.services.files.catalogue.files(
        asked.caller, after=wanted.after, limit=wanted.limit, order=wanted.order, purpose=wanted.purpose
    )

    def written() -> Response:
        data = [file_object(name, record) for name, record in page]
        first, last = (data[0].id, data[-1].id) if data else (None, None)
        return json_response(FileList(data=data, first_id=first, last_id=last, has_more=more))

    return await asked.services.beside(written)


@router.get("/v1/files/{file_id}", summary="One file")
async def get_file(asked: Asked, file_id: str) -> File:
    """The name, size, purpose and times of a file."""
    return file_object(file_id, await asked.services.files.catalogue.file(asked.caller, file_id))


@router.delete("/v1/files/{file_id}", summary="Delete a file")
async def delete_file(asked: Asked, file_id: str) -> Deleted:
    """Remove a file and its bytes."""
    await asked.services.files.catalogue.delete_file(asked.caller, file_id)
    return Deleted(id=file_id, object="file")


@router.get(
    "/v1/files/{file_id}/content",
    summary="The bytes of a file",
    response_class=Response,
    openapi_extra=described(
        parameters=[header("Range", {"type": "string"})],
        answers=answered("All bytes.", BYTES) | answered("The range that was asked for.", BYTES, status=206),
    ),
)
async def get_file_content(asked: Asked, file_id: str) -> Response:
    """All bytes of a file, or a range of them."""
    files = asked.services.files
    record = await files.catalogue.file(asked.caller, file_id)
    etag = f'"{file_id}"'
    same = asked.headers.get("if-range", etag) == etag
    part = byte_range(asked.headers.get("range"), record.size) if same else None
    start, stop = part or (0, record.size)
    headers = {
        "accept-ranges": "bytes",
        "etag": etag,
        # so that a browser neither shows nor runs the file, whatever its name
        "content-disposition": f"attachment; filename*=UTF-8''{quote(record.details.filename, safe='')}",
        "x-content-type-options": "nosniff",
        **({"content-range": f"bytes {start}-{stop - 1}/{record.size}"} if part else {}),
    }

    async def write(writer: ResponseWriter) -> None:
        await writer.start(BYTES, stop - start, headers, 206 if part else 200)
        async with aclosing(files.read(record.segments, start, stop)) as pieces:
            async for piece in pieces:
                await writer.write(piece)
        await writer.finish()

    # An answer that fails ends before the announced length, so that no client takes it for whole.
    return asked.streamed(write, no_error_trailer)


def _details(form: Form) -> Details:
    """The fields of a form as the JSON of an upload would say them.

    Raises: BadRequest naming the field.
    """
    values: dict[str, object] = {
        "bytes": 0,
        "filename": form.file.filename or "upload",
        "mime_type": form.file.content_type or BYTES,
    }
    if "purpose" in form.values:
        values["purpose"] = form.values["purpose"]
    if ANCHOR in form.values or SECONDS in form.values:
        seconds = form.values.get(SECONDS, "")
        if not (seconds.isascii() and seconds.isdigit() and len(seconds) < 10):
            raise BadRequest(f"{SECONDS} is {seconds[:40]!r}; a number of seconds was needed", param=SECONDS)
        after = {"anchor": form.values.get(ANCHOR), "seconds": int(seconds)}
        values["expires_after"] = validated(ExpiresAfter, after)
    return details_of(validated(UploadRequest, values))
