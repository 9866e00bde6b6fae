"""The ledger of uploads and files: the records, the keys they stand under, whose bytes are whose, and how much anybody
may have.

    secret                    32 random bytes: what salts callers
    total, usage/TENANT       Usage of all, and of one caller
    upload/ID                 UploadRecord
    part/UPLOAD/ID            PartRecord
    file/ID                   FileRecord
    oldest/TENANT/TIME/ID     the files of a caller in the order they were made
    newest/TENANT/EMIT/ID     the same in the other order
    expiry/TIME/KIND/ID       when an upload or a file ends; KIND is `upload` or `file`
    blob/NAME                 BlobRecord: whose bytes these are
    held/NAME                 bytes that are being written

TENANT is a salted hash of the caller, EMIT is TIME counted backwards (`remote_moment`).
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, TypeVar, final

import msgspec
from msgspec import Meta

from dist_attn.settings import FileSettings
from dist_attn.store.ledger import Ledger, Record, Sums, changed, decode, moment, of_tenant
from dist_attn.store.ports import BufferedTransaction
from dist_attn_service.base.errors import NO_RETRY, Code, NotFound, ServiceError
from dist_attn_service.text.tokenising import TextMark

Size = Annotated[int, Meta(ge=0)]
PAGE = 1000
_END_OF_TIME = 10.0**12


class Usage(Sums, frozen=True):
    """What is kept for one caller, or for all. `entries` counts uploads and files."""

    bytes: int = 0
    entries: int = 0


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


class UploadRecord(Record, frozen=True, forbid_unknown_fields=True):
    """An upload of `length` bytes, which come as parts or as one stream.

    Of parts: `received` bytes are in whole ones, `writing` at most are on their way. Of a stream: `blob` holds it,
    `synced` bytes of it survive a power cut, and what was written beyond is trusted while this is still `boot`.
    `made_of` are the parts that the file was made of. `metadata` is what tus was given, `feed` the session it feeds.
    """

    KIND: ClassVar[str] = "upload"
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

    def index(self, name: str) -> tuple[str, ...]:
        """Those that end, by when."""
        return (f"expiry/{moment(self.expires_at)}/upload/{name}",)

    def sums(self) -> Mapping[str, Sums]:
        """One entry."""
        return of_tenant(self.tenant, Usage(self.charge, entries=1))


class PartRecord(Record, frozen=True, forbid_unknown_fields=True):
    """A part that is whole."""

    KIND: ClassVar[str] = "part"
    segment: Segment
    made_at: float


class FileRecord(Record, frozen=True, forbid_unknown_fields=True):
    """A file: its bytes are those of its segments, one after the other. `expires_at` is 0 for never."""

    KIND: ClassVar[str] = "file"
    tenant: str
    details: Details
    size: Size
    made_at: float
    expires_at: float
    segments: tuple[Segment, ...]

    def index(self, name: str) -> tuple[str, ...]:
        """Those of a caller in either order; those that end, by when."""
        return (
            f"oldest/{self.tenant}/{moment(self.made_at)}/{name}",
            f"newest/{self.tenant}/{remote_moment(self.made_at)}/{name}",
            *([f"expiry/{moment(self.expires_at)}/file/{name}"] if self.expires_at else []),
        )

    def sums(self) -> Mapping[str, Sums]:
        """One entry."""
        return of_tenant(self.tenant, Usage(self.size, entries=1))


class BlobRecord(Record, frozen=True, forbid_unknown_fields=True):
    """Bytes on disk: of `owner`, an upload or a file by its key; with `held` bytes reserved while they are written.

    Without an owner they are those of a file that is being sent.
    """

    KIND: ClassVar[str] = "blob"
    tenant: str
    owner: str
    made_at: float
    held: Size = 0

    def index(self, name: str) -> tuple[str, ...]:
        """Those that are being written."""
        return (f"held/{name}",) if self.held else ()

    def sums(self) -> Mapping[str, Sums]:
        """What is held for a file; what is held for a part counts as its upload's."""
        return of_tenant(self.tenant, Usage(self.held)) if self.held and not self.owner else {}


def remote_moment(time: float) -> str:
    """Seconds since 1970 as a key: keys stand in the order opposite to time."""
    return moment(_END_OF_TIME - time)


# ---- changes -------------------------------------------------------------------------------------

Owned = TypeVar("Owned", UploadRecord, FileRecord)


@final
class FileLedger(Ledger):
    """Changes uploads and files so that the owners of bytes always agree."""

    def __init__(self, transaction: BufferedTransaction, limits: FileSettings, now: float) -> None:
        super().__init__(transaction, now)
        self.limits = limits

    def check(self, key: str, before: Usage, after: Usage) -> None:
        """Raises: ServiceError (429, 507) for more than the caller, or all, may have."""
        limits = self.limits
        if key == "total":
            if after.bytes > limits.all_bytes:
                raise ServiceError(
                    f"all files of this service may have {limits.all_bytes} bytes, which are taken; try again later",
                    code=Code.DISK_FULL,
                    headers=NO_RETRY,
                )
        elif after.entries > limits.caller_files:
            raise _over_quota(f"you would have {after.entries} files and uploads; you may have {limits.caller_files}")
        elif after.bytes > limits.caller_bytes:
            raise _over_quota(f"your files would have {after.bytes} bytes; they may have {limits.caller_bytes}")

    async def owned(self, kind: type[Owned], tenant: str, name: str) -> Owned:
        """The record of a caller's upload or file.

        Raises: NotFound when it is not there, has expired, or is somebody else's, which sounds the same.
        """
        record = await self.find(kind, name)
        if record is None or record.tenant != tenant or 0 < record.expires_at <= self.now:
            raise NotFound(f"there is no {kind.KIND} {name[:80]!r}; it was deleted, has expired, or never was")
        return record

    # ---- uploads -------------------------------------------------------------------------------

    async def drop_upload(self, name: str, record: UploadRecord) -> None:
        """Forget an upload and its bytes."""
        await self.empty_upload(name, record)
        await self.forget(name, record)

    async def empty_upload(self, name: str, record: UploadRecord, keep: frozenset[str] = frozenset()) -> None:
        """Forget the bytes of an upload, except the blobs that are to be kept; the record is the caller's to change."""
        for key, value in await self.transaction.scan(f"part/{name}/", self.limits.upload_parts + PAGE):
            blob = decode(value, PartRecord).segment.blob
            self.transaction.delete(key)
            if blob not in keep:
                self.drop_blob(blob)
        if record.blob and record.blob not in keep:
            self.drop_blob(record.blob)

    # ---- files ---------------------------------------------------------------------------------

    async def add_file(self, name: str, record: FileRecord) -> None:
        """Enter a file and make it the owner of its blobs, for which nothing is held any more.

        Raises: ServiceError (429, 507).
        """
        await self.save(name, record)
        for segment in record.segments:
            await self.save(segment.blob, BlobRecord(record.tenant, f"file/{name}", self.now))

    async def drop_file(self, name: str, record: FileRecord) -> None:
        """Forget a file and its bytes."""
        await self.forget(name, record)
        for segment in record.segments:
            self.drop_blob(segment.blob)

    # ---- blobs ---------------------------------------------------------------------------------

    async def blob(self, name: str) -> BlobRecord:
        """Whose bytes these are.

        Raises: NotFound when no file or upload has it any more.
        """
        record = await self.find(BlobRecord, name)
        if record is None:
            raise NotFound("what these bytes were sent for was deleted or has expired meanwhile")
        return record

    def drop_blob(self, name: str) -> None:
        """Bytes that are whole, which no sum counts as a blob's, are nobody's: they go."""
        for key in (f"blob/{name}", f"held/{name}"):
            self.transaction.delete(key)
        self.dropped.append(name)

    async def release(self, name: str, record: BlobRecord) -> None:
        """What was being written is given up: nothing is held for it any more, and its bytes go."""
        await self.forget(name, record)
        self.dropped.append(name)
        upload = record.owner.removeprefix("upload/")
        if record.owner and (before := await self.find(UploadRecord, upload)) is not None:
            await self.save(upload, changed(before, writing=before.writing - record.held), before)


def _over_quota(message: str) -> ServiceError:
    return ServiceError(f"{message}; delete some", code=Code.INSUFFICIENT_QUOTA, headers=NO_RETRY)
