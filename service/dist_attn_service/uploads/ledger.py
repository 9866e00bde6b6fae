"""The ledger of uploads and files: the records and their keys, and the limits of callers.

    secret                    32 random bytes: the salt of callers' hashes
    total, usage/TENANT       Usage of all, and of one caller
    upload/ID                 UploadRecord
    file/ID                   FileRecord
    oldest/TENANT/TIME/ID     the files of a caller in the order they were made
    newest/TENANT/EMIT/ID     the files of a caller in the opposite order
    expiry/TIME/KIND/ID       uploads and files by expiry; KIND is `upload` or `file`
    blob/NAME                 the blobs of all uploads and files; in earlier versions with records of their own
    form/ID                   uploads that come in one form, which end with their writer

TENANT is a salted hash of the caller, EMIT is TIME counted backwards (`remote_moment`).
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar, final

import msgspec
from msgspec import Meta

from dist_attn.settings import FileSettings
from dist_attn.store.ledger import Ledger, Record, Sums, moment, of_tenant
from dist_attn.store.ports import BufferedTransaction
from dist_attn_service.base.errors import NO_RETRY, Code, NotFound, ServiceError

Size = Annotated[int, Meta(ge=0)]
_END_OF_TIME = 10.0**12


class Usage(Sums, frozen=True):
    """The storage of one caller, or of all. `entries` counts uploads and files."""

    bytes: int = 0
    entries: int = 0


class Segment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of a file: `size` bytes in a blob of their own."""

    blob: str
    size: Size


class Details(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The details of a file, as a client gives them; its name is never that of a file on disk.

    `lives_s` is for how long the file is kept once it is there, in seconds, 0 for ever.
    """

    filename: str
    mime_type: str
    purpose: str
    lives_s: float = 0.0


class UploadRecord(Record, frozen=True, omit_defaults=True):
    """An upload of `length` bytes. Earlier versions had more fields, could cancel one, and refuse unknown fields.

    `blob` holds its bytes from the first one on: `synced` of them survive a power cut, and bytes beyond them are
    trusted while the machine's start is `boot`. `metadata` is tus's header, `feed` the notes of who reads it while
    it arrives. One that comes in a form (`is_form`) may have `length` bytes so far, and ends with its writer.
    """

    KIND: ClassVar[str] = "upload"
    tenant: str
    length: Size
    details: Details
    made_at: float
    expires_at: float
    state: Literal["pending", "completed", "cancelled"] = "pending"
    blob: str = ""
    synced: Size = 0
    boot: str = ""
    file: str = ""
    metadata: str = ""
    feed: dict[str, Any] | None = None
    is_form: bool = False

    @property
    def blobs(self) -> list[str]:
        """The names of its blobs."""
        return [self.blob] if self.blob else []

    @property
    def charge(self) -> int:
        """The bytes that are charged to the caller: those announced."""
        return self.length if self.state == "pending" else 0

    def index(self, name: str) -> tuple[str, ...]:
        """The keys in the indexes of blobs, and of expiry times or forms."""
        ends = f"form/{name}" if self.is_form else f"expiry/{moment(self.expires_at)}/upload/{name}"
        return (ends, *(f"blob/{blob}" for blob in self.blobs))

    def sums(self) -> Mapping[str, Sums]:
        """The usage of the upload: one entry unless it is a form, and the bytes charged."""
        return of_tenant(self.tenant, Usage(self.charge, entries=0 if self.is_form else 1))


class FileRecord(Record, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A file: its bytes are those of its segments, one after the other. `expires_at` is 0 for never.

    Behind the text of a document its blob has so many bytes of JSON with its `sections`.
    """

    KIND: ClassVar[str] = "file"
    tenant: str
    details: Details
    size: Size
    made_at: float
    expires_at: float
    segments: tuple[Segment, ...]
    sections: Size = 0

    @property
    def blobs(self) -> list[str]:
        """The names of its blobs."""
        return [segment.blob for segment in self.segments]

    def index(self, name: str) -> tuple[str, ...]:
        """The keys in the indexes of a caller's files in either order, of blobs, and of expiry times."""
        return (
            f"oldest/{self.tenant}/{moment(self.made_at)}/{name}",
            f"newest/{self.tenant}/{remote_moment(self.made_at)}/{name}",
            *(f"blob/{blob}" for blob in self.blobs),
            *([f"expiry/{moment(self.expires_at)}/file/{name}"] if self.expires_at else []),
        )

    def sums(self) -> Mapping[str, Sums]:
        """The usage of the file: one entry, and its bytes."""
        return of_tenant(self.tenant, Usage(self.size + self.sections, entries=1))


def remote_moment(time: float) -> str:
    """Seconds since 1970 as a key, such that the order of keys is opposite to that of time."""
    return moment(_END_OF_TIME - time)


# ---- changes -------------------------------------------------------------------------------------

Owned = TypeVar("Owned", UploadRecord, FileRecord)


@final
class FileLedger(Ledger):
    """One transaction on uploads and files."""

    def __init__(self, transaction: BufferedTransaction, limits: FileSettings, now: float) -> None:
        super().__init__(transaction, now)
        self.limits = limits

    def check(self, key: str, before: Usage, after: Usage) -> None:
        """Check a usage. Raises: ServiceError (429, 507) for more than the caller, or all, may have."""
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

        Raises: NotFound, in the same words when it is not there, has expired, or is another caller's.
        """
        record = await self.find(kind, name)
        if record is None or record.tenant != tenant or 0 < record.expires_at <= self.now:
            raise NotFound(f"there is no {kind.KIND} {name[:80]!r}; it was deleted, has expired, or never was")
        return record

    async def drop(self, name: str, record: UploadRecord | FileRecord) -> None:
        """Forget an upload or a file, and its bytes."""
        await self.forget(name, record)
        self.dropped += record.blobs


def _over_quota(message: str) -> ServiceError:
    return ServiceError(f"{message}; delete some", code=Code.INSUFFICIENT_QUOTA, headers=NO_RETRY)
