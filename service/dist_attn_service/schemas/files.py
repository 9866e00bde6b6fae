"""The JSON of files and uploads, in OpenAI's shapes; unknown keys are refused, nothing is converted silently."""

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from dist_attn_service.schemas.base import Input, Output

__all__ = [
    "PURPOSES",
    "CompleteUploadRequest",
    "ExpiresAfter",
    "FileDeleted",
    "FileList",
    "FileListOptions",
    "FileObject",
    "FilePurpose",
    "UploadObject",
    "UploadPart",
    "UploadRequest",
    "UploadSession",
]

FilePurpose = Literal["assistants", "batch", "fine-tune", "vision", "user_data", "evals"]
PURPOSES: tuple[FilePurpose, ...] = ("assistants", "batch", "fine-tune", "vision", "user_data", "evals")
MOST_LISTED = 10_000
HOUR, MONTH = 3600, 2_592_000


def _printable(text: str) -> str:
    """A name is shown in lists and headers: nothing in it may end a line, and UTF-8 must be able to say it."""
    if any(
        ord(character) < 32 or 0x7F <= ord(character) < 0xA0 or 0xD800 <= ord(character) < 0xE000 for character in text
    ):
        raise ValueError("it holds control characters, or half of a surrogate pair")
    return text


def _query_number(value: object) -> object:
    """In a query a number is its digits."""
    if isinstance(value, str):
        if not value.isascii() or not value.isdigit() or len(value) > 9:
            raise ValueError("a whole number was needed, in digits alone")
        return int(value)
    return value


Printable = Annotated[str, Field(max_length=1024), AfterValidator(_printable)]


class ExpiresAfter(Input):
    """When a file is to end: so many seconds after it is made."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=HOUR, le=MONTH)]


class UploadRequest(Input):
    """An upload of so many bytes, which then come as parts or by PATCH."""

    bytes: Annotated[int, Field(ge=0)]
    filename: Printable
    mime_type: Printable
    purpose: FilePurpose
    expires_after: ExpiresAfter | None = None
    session_id: Annotated[str, Field(max_length=100)] | None = Field(
        default=None, description="a session that is fed with it while it arrives, by PATCH"
    )
    expected_position: Annotated[int, Field(ge=0, le=1 << 53)] | None = Field(
        default=None, description="where that session must stand"
    )


class CompleteUploadRequest(Input):
    """The parts of a file in their order; `md5` of the whole in hex, if it is to be compared."""

    part_ids: Annotated[list[str], Field(max_length=10_000, fail_fast=True)]
    md5: Annotated[str, Field(pattern="^[0-9a-fA-F]{32}$")] | None = None


class FileListOptions(Input):
    """Which files to list; in the query."""

    after: str | None = None
    limit: Annotated[int, Field(ge=1, le=MOST_LISTED), BeforeValidator(_query_number)] = MOST_LISTED
    order: Literal["asc", "desc"] = "desc"
    purpose: FilePurpose | None = None


class FileObject(Output):
    """A file; `expires_at` is null for one that stays until it is deleted."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    mime_type: str
    status: Literal["processed"] = "processed"


class FileList(Output):
    """A page of files."""

    object: Literal["list"] = "list"
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(Output):
    """A file that is no more."""

    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


class UploadSession(Output):
    """The session that an upload feeds: its text begins at `start`, is read up to `position`, kept to `checkpoint`."""

    id: str
    state: Literal["waiting", "feeding", "done", "failed"]
    start: int
    position: int
    checkpoint: int
    error: str | None


class UploadObject(Output):
    """An upload; `received_bytes` are on disk, `file` is there once it is completed, `session` where it feeds one."""

    id: str
    object: Literal["upload"] = "upload"
    bytes: int
    received_bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    mime_type: str
    status: Literal["pending", "completed", "cancelled"]
    file: FileObject | None
    session: UploadSession | None = None


class UploadPart(Output):
    """A part of an upload."""

    id: str
    object: Literal["upload.part"] = "upload.part"
    created_at: int
    upload_id: str
