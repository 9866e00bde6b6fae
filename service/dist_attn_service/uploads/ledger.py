"""The ledger of uploads and files: whose bytes are whose, what goes with what, and how much anybody may have."""

from typing import final

from dist_attn.settings import FileSettings
from dist_attn.store.ledger import Ledger, changed, decode
from dist_attn.store.records import BufferedTransaction
from dist_attn_service.base.errors import Code, NotFound, ServiceError
from dist_attn_service.uploads.byte_files import NO_RETRY
from dist_attn_service.uploads.entries import BlobRecord, FileRecord, PartRecord, UploadRecord, Usage

PAGE = 1000


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

    # ---- uploads -------------------------------------------------------------------------------

    async def upload(self, tenant: str, name: str) -> UploadRecord:
        """The record of a caller's upload.

        Raises: NotFound when it is not there, has expired, or is somebody else's, which sounds the same.
        """
        record = await self.find(UploadRecord, name)
        if record is None or record.tenant != tenant or record.expires_at <= self.now:
            raise NotFound(f"there is no upload {name[:80]!r}; it was deleted, has expired, or never was")
        return record

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

    async def file(self, tenant: str, name: str) -> FileRecord:
        """The record of a caller's file.

        Raises: NotFound when it is not there, has expired, or is somebody else's, which sounds the same.
        """
        record = await self.find(FileRecord, name)
        if record is None or record.tenant != tenant or 0 < record.expires_at <= self.now:
            raise NotFound(f"there is no file {name[:80]!r}; it was deleted, has expired, or never was")
        return record

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

        Raises: NotFound when nobody's any more.
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
