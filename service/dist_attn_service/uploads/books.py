"""The books of one transaction: what is charged to whom, and which records and indices belong together."""

from typing import final

from dist_attn.settings import FileSettings
from dist_attn.store.records import BufferedTransaction
from dist_attn_service.base.errors import Code, NotFound, ServiceError
from dist_attn_service.uploads.byte_files import NO_RETRY
from dist_attn_service.uploads.entries import (
    BlobRecord,
    FileRecord,
    PartRecord,
    UploadRecord,
    Usage,
    changed,
    decode,
    encode,
    moment,
    remote_moment,
)

__all__ = ["Books"]

PAGE = 1000


@final
class Books:
    """Reads and changes records so that charges, indices and owners always agree. Time is in seconds since 1970."""

    def __init__(self, transaction: BufferedTransaction, limits: FileSettings, now: float) -> None:
        self.transaction = transaction
        self.limits = limits
        self.now = now
        self.dropped: list[str] = []
        """Blobs to delete once the transaction is committed."""

    # ---- charges -------------------------------------------------------------------------------

    async def usage(self, tenant: str = "") -> Usage:
        """What a caller has; without a name, what all have."""
        value = await self.transaction.get(f"usage/{tenant}" if tenant else "total")
        return Usage() if value is None else decode(value, Usage)

    async def charge(self, tenant: str, *, size: int = 0, entries: int = 0) -> None:
        """Add to what a caller and all have.

        Raises: ServiceError (429, 507) for more than the caller, or all, may have.
        """
        for name, key in ((tenant, f"usage/{tenant}"), ("", "total")):
            usage = (await self.usage(name)).plus(size=size, entries=entries)
            if size > 0 or entries > 0:
                self._within_limits(usage, mine=bool(name))
            if usage == Usage():
                self.transaction.delete(key)
            else:
                self.transaction.put(key, encode(usage))

    def _within_limits(self, usage: Usage, *, mine: bool) -> None:
        limits = self.limits
        if mine and usage.entries > limits.caller_files:
            raise _over_quota(f"you would have {usage.entries} files and uploads; you may have {limits.caller_files}")
        if mine and usage.bytes > limits.caller_bytes:
            raise _over_quota(f"your files would have {usage.bytes} bytes; they may have {limits.caller_bytes}")
        if usage.bytes > limits.all_bytes:
            raise ServiceError(
                f"all files of this service may have {limits.all_bytes} bytes, which are taken; try again later",
                code=Code.DISK_FULL,
                status=507,
                headers=NO_RETRY,
            )

    # ---- uploads -------------------------------------------------------------------------------

    async def upload(self, tenant: str, name: str) -> UploadRecord:
        """The record of a caller's upload.

        Raises: NotFound when it is not there, has expired, or is somebody else's, which sounds the same.
        """
        value = await self.transaction.get(f"upload/{name}")
        record = None if value is None else decode(value, UploadRecord)
        if record is None or record.tenant != tenant or record.expires_at <= self.now:
            raise NotFound(f"there is no upload {name[:80]!r}; it was deleted, has expired, or never was")
        return record

    async def save_upload(self, name: str, record: UploadRecord, before: UploadRecord | None) -> None:
        """Write a record, its charge, and when it ends.

        Raises: ServiceError (429, 507).
        """
        more = record.charge - (before.charge if before else 0)
        await self.charge(record.tenant, size=more, entries=0 if before else 1)
        self._move_expiry("upload", name, before.expires_at if before else 0.0, record.expires_at)
        self.transaction.put(f"upload/{name}", encode(record))

    async def drop_upload(self, name: str, record: UploadRecord) -> None:
        """Forget an upload and its bytes."""
        await self.empty_upload(name, record)
        await self.charge(record.tenant, size=-record.charge, entries=-1)
        self._move_expiry("upload", name, record.expires_at, 0.0)
        self.transaction.delete(f"upload/{name}")

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

    async def file(self, tenant: str, name: str) -> FileRecord:
        """The record of a caller's file.

        Raises: NotFound when it is not there, has expired, or is somebody else's, which sounds the same.
        """
        value = await self.transaction.get(f"file/{name}")
        record = None if value is None else decode(value, FileRecord)
        if record is None or record.tenant != tenant or 0 < record.expires_at <= self.now:
            raise NotFound(f"there is no file {name[:80]!r}; it was deleted, has expired, or never was")
        return record

    async def add_file(self, name: str, record: FileRecord) -> None:
        """Enter a file and make it the owner of its blobs.

        Raises: ServiceError (429, 507).
        """
        await self.charge(record.tenant, size=record.size, entries=1)
        for segment in record.segments:
            self.put_blob(segment.blob, BlobRecord(record.tenant, f"file/{name}", self.now))
        self._move_expiry("file", name, 0.0, record.expires_at)
        for key in _places(name, record):
            self.transaction.put(key, b"")
        self.transaction.put(f"file/{name}", encode(record))

    async def drop_file(self, name: str, record: FileRecord) -> None:
        """Forget a file and its bytes."""
        await self.charge(record.tenant, size=-record.size, entries=-1)
        for segment in record.segments:
            self.drop_blob(segment.blob)
        self._move_expiry("file", name, record.expires_at, 0.0)
        for key in _places(name, record):
            self.transaction.delete(key)
        self.transaction.delete(f"file/{name}")

    # ---- blobs ---------------------------------------------------------------------------------

    async def blob(self, name: str) -> BlobRecord:
        """Whose bytes these are.

        Raises: NotFound when nobody's any more.
        """
        value = await self.transaction.get(f"blob/{name}")
        if value is None:
            raise NotFound("what these bytes were sent for was deleted or has expired meanwhile")
        return decode(value, BlobRecord)

    def put_blob(self, name: str, record: BlobRecord) -> None:
        """Say whose bytes these are, and whether they are being written."""
        self.transaction.put(f"blob/{name}", encode(record))
        if record.held:
            self.transaction.put(f"held/{name}", b"")
        else:
            self.transaction.delete(f"held/{name}")

    def drop_blob(self, name: str) -> None:
        """They are nobody's: their bytes go."""
        self.transaction.delete(f"blob/{name}")
        self.transaction.delete(f"held/{name}")
        self.dropped.append(name)

    async def release(self, name: str, record: BlobRecord) -> None:
        """What was being written is given up: nothing is held for it any more, and its bytes go."""
        self.drop_blob(name)
        upload = record.owner.removeprefix("upload/")
        if not record.owner:
            await self.charge(record.tenant, size=-record.held)
        elif (value := await self.transaction.get(record.owner)) is not None:
            before = decode(value, UploadRecord)
            await self.save_upload(upload, changed(before, writing=before.writing - record.held), before)

    def _move_expiry(self, kind: str, name: str, before: float, after: float) -> None:
        """`0` is never."""
        if before != after:
            if before:
                self.transaction.delete(f"expiry/{moment(before)}/{kind}/{name}")
            if after:
                self.transaction.put(f"expiry/{moment(after)}/{kind}/{name}", b"")


def _places(name: str, record: FileRecord) -> tuple[str, str]:
    """Where a file stands among those of its caller."""
    return (
        f"oldest/{record.tenant}/{moment(record.made_at)}/{name}",
        f"newest/{record.tenant}/{remote_moment(record.made_at)}/{name}",
    )


def _over_quota(message: str) -> ServiceError:
    return ServiceError(f"{message}; delete some", code=Code.INSUFFICIENT_QUOTA, status=429, headers=NO_RETRY)
