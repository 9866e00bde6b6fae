"""What is known of uploads and files: the records, and the keys they stand under.

    secret                    32 random bytes: what salts callers
    total, usage/TENANT       Usage of all, and of one caller
    upload/ID                 UploadRecord
    part/UPLOAD/ID            PartRecord
    file/ID                   FileRecord
    oldest/TENANT/TIME/ID     the files of a caller in the order they were made
    newest/TENANT/EMIT/ID     the same in the other order
    expiry/TIME/KIND/ID       when an upload or a file ends; KIND is `upload` or `file`
    blob/NAME                 BlobRecord: whose bytes these are

TENANT is a salted hash of the caller. Values are JSON, so that a catalogue can be looked at.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, structs

from dist_attn.store.entries import decode, encode, moment
from dist_attn_service.text.tokenising import TextMark

__all__ = [
    "BlobRecord",
    "Details",
    "FeedMark",
    "FeedRecord",
    "FileRecord",
    "PartRecord",
    "Segment",
    "UploadRecord",
    "Usage",
    "changed",
    "decode",
    "encode",
    "moment",
    "remote_moment",
]

Size = Annotated[int, Meta(ge=0)]
_END_OF_TIME = 10.0**12


class Usage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is kept for one caller, or for all. `entries` counts uploads and files."""

    bytes: int = 0
    entries: int = 0

    def plus(self, *, size: int = 0, entries: int = 0) -> "Usage":
        """With so many more."""
        return Usage(self.bytes + size, self.entries + entries)


class Segment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """So many bytes of a file, in a blob of their own."""

    blob: str
    size: Size


class Details(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a client says of a file; its name is never that of a file on disk.

    `lives_s` is how long the file is to live once it is there, 0 for ever.
    """

    filename: str
    mime_type: str
    purpose: str
    lives_s: float = 0.0


class FeedMark(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A position of a session whose state was to be kept, and the place of the text from which it is read on."""

    position: Size
    mark: TextMark


class FeedRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The session that an upload feeds: it stood at `expected`, and the text begins at `start` once that is known.

    It was kept up to `position`. Of the last two states there are `marks`: the very last may not have come to be.
    """

    session: str
    expected: Size
    is_text: bool
    start: int | None = None
    position: Size = 0
    marks: tuple[FeedMark, ...] = ()
    state: Literal["waiting", "feeding", "done", "failed"] = "waiting"
    error: str = ""


class UploadRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An upload of `length` bytes, which come as parts or as one stream.

    Of parts: `received` bytes are in whole ones, `writing` at most are on their way. Of a stream: `blob` holds it,
    `synced` bytes of it survive a power cut, and what was written beyond is trusted while this is still `boot`.
    `made_of` are the parts that the file was made of. `metadata` is what tus was given, `feed` the session it feeds.
    """

    tenant: str
    length: Size
    details: Details
    made_at: float
    expires_at: float
    state: Literal["pending", "completed", "cancelled"] = "pending"
    kind: Literal["", "parts", "stream"] = ""
    parts: Size = 0
    received: Size = 0
    writing: Size = 0
    blob: str = ""
    synced: Size = 0
    boot: str = ""
    file: str = ""
    made_of: tuple[str, ...] = ()
    metadata: str = ""
    feed: FeedRecord | None = None

    @property
    def charge(self) -> int:
        """Bytes that count as its caller's: those that were announced, or that came because parts came again."""
        return max(self.length, self.received + self.writing) if self.state == "pending" else 0


class PartRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part that is whole."""

    segment: Segment
    made_at: float


class FileRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file: its bytes are those of its segments, one after the other. `expires_at` is 0 for never."""

    tenant: str
    details: Details
    size: Size
    made_at: float
    expires_at: float
    segments: tuple[Segment, ...]


class BlobRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bytes on disk: of `owner`, an upload or a file by its key; with `held` bytes reserved while they are written.

    Without an owner they are those of a file that is being sent.
    """

    tenant: str
    owner: str
    made_at: float
    held: Size = 0


def remote_moment(time: float) -> str:
    """Seconds since 1970 as a key: keys stand in the order opposite to time."""
    return moment(_END_OF_TIME - time)


changed = structs.replace
"""The same record with other values in some fields."""
