"""The catalogue of uploads and files, changed in transactions that several processes share."""

import re
import secrets
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any, Literal, TypeVar, final

from dist_attn.errors import StorageError
from dist_attn.settings import FileSettings
from dist_attn.store.ledger import change, changed, moment, salted, secret_of, unknown_beside
from dist_attn.store.open import lost_catalogue
from dist_attn.store.ports import Records
from dist_attn_service.base.errors import NO_RETRY, Code, Conflict, NotFound, ServiceError, TooLarge
from dist_attn_service.uploads.byte_files import ByteFolder
from dist_attn_service.uploads.ledger import (
    Details,
    FileLedger,
    FileRecord,
    Owned,
    Segment,
    UploadRecord,
    Usage,
    remote_moment,
)

T = TypeVar("T")
Notes = dict[str, Any]
PAGE = 500
TEXT = "-text"  # behind the id of a document: the file with its text
COMPLETED_S = 3600.0  # for which a completed upload can still be asked for, so that a lost answer can be had again
_ID = re.compile("[A-Za-z0-9_-]{1,64}")


def new_id(kind: str) -> str:
    """An id that cannot be guessed, such as `file-…`."""
    return kind + secrets.token_urlsafe(18)


@final
class Catalogue:
    """The uploads and files of all callers; a caller learns nothing of another's."""

    def __init__(
        self, records: Records, secret: bytes, limits: FileSettings, folder: ByteFolder, clock: Callable[[], float]
    ) -> None:
        self.records = records
        self._secret = secret
        self._folder = folder
        self.limits = limits
        self.clock = clock
        self.total = Usage()
        """The usage of all callers when this process last looked."""

    @staticmethod
    async def open(
        records: Records, limits: FileSettings, folder: ByteFolder, clock: Callable[[], float] = time.time
    ) -> "Catalogue":
        """The catalogue in these records.

        Raises: StorageError, also for new records over a folder with bytes, which would be swept away as unknown.
        """

        async def count() -> int:
            return len(await folder.names())

        if number := await unknown_beside(records, count):
            raise lost_catalogue(folder.place, f"{number} files or uploads")
        return Catalogue(records, await secret_of(records), limits, folder, clock)

    def tenant(self, caller: str) -> str:
        """The salted hash by which keys name a caller."""
        return salted(self._secret, caller.encode())[:32]

    async def change(self, work: Callable[[FileLedger], Awaitable[T]]) -> T:
        """Run work on the ledger in one transaction, and delete the blobs that it has dropped.

        Raises: ServiceError (507) when the catalogue cannot be read or written; whatever `work` raises.
        """

        async def counted(ledger: FileLedger) -> tuple[T, Usage]:
            return await work(ledger), await ledger.usage(Usage)

        try:
            (result, self.total), dropped = await change(
                self.records, lambda transaction: FileLedger(transaction, self.limits, self.clock()), counted
            )
        except StorageError as error:
            raise ServiceError(str(error), code=Code.STORAGE_FAILED, headers=NO_RETRY) from None
        await self._folder.delete(dropped)
        return result

    # ---- uploads -------------------------------------------------------------------------------

    async def begin(
        self, caller: str, length: int, details: Details, metadata: str = "", feed: Notes | None = None
    ) -> tuple[str, UploadRecord]:
        """Begin an upload of so many bytes, perhaps with the notes of who reads it while it arrives.

        Raises: TooLarge, ServiceError (429, 507).
        """
        if length > self.limits.file_bytes:
            raise TooLarge(f"a file may have {self.limits.file_bytes} bytes; this one has {length}", param="bytes")
        name = new_id("upload_")

        async def enter(ledger: FileLedger) -> UploadRecord:
            ends = ledger.now + self.limits.upload_s
            record = UploadRecord(self.tenant(caller), length, details, ledger.now, ends, metadata=metadata, feed=feed)
            await ledger.save(name, record)
            return record

        return name, await self.change(enter)

    async def upload(self, caller: str, name: str) -> UploadRecord:
        """Find the record of an upload.

        Raises: NotFound.
        """
        return await self.change(lambda ledger: ledger.owned(UploadRecord, self.tenant(caller), known(name)))

    async def change_upload(
        self, caller: str, name: str, work: Callable[[UploadRecord], UploadRecord], *, ended: bool = False
    ) -> UploadRecord:
        """Change an upload that is pending, with `ended` also another one.

        Raises: NotFound; ServiceError (409) for one that is not pending.
        """

        async def run(ledger: FileLedger) -> UploadRecord:
            before = await ledger.owned(UploadRecord, self.tenant(caller), known(name))
            after = work(before if ended else pending(before))
            await ledger.save(name, after, before)
            return after

        return await self.change(run)

    async def delete_upload(self, caller: str, name: str) -> None:
        """Forget an upload, and its bytes unless a file has them.

        Raises: NotFound.
        """
        await self._delete(UploadRecord, caller, name)

    async def _delete(self, kind: type[Owned], caller: str, name: str) -> None:
        async def drop(ledger: FileLedger) -> None:
            await ledger.drop(name, await ledger.owned(kind, self.tenant(caller), known(name)))

        await self.change(drop)

    async def complete(self, caller: str, name: str) -> UploadRecord:
        """Make a file of an upload whose bytes are all there.

        Raises: NotFound; ServiceError (409).
        """

        async def run(ledger: FileLedger) -> UploadRecord:
            before = pending(await ledger.owned(UploadRecord, self.tenant(caller), known(name)))
            file = new_id("file-")
            done = changed(before, state="completed", file=file, blob="", expires_at=ledger.now + COMPLETED_S)
            # First, so that the announced bytes are given back before the file is charged.
            await ledger.save(name, done, before)
            await self.add_file(ledger, file, done, before.blob)
            return done

        return await self.change(run)

    # ---- files ---------------------------------------------------------------------------------

    async def file(self, caller: str, name: str) -> FileRecord:
        """Find the record of a file.

        Raises: NotFound.
        """
        return await self.change(lambda ledger: ledger.owned(FileRecord, self.tenant(caller), known(name)))

    async def delete_file(self, caller: str, name: str) -> None:
        """Forget a file and its bytes, and its text where it is a document.

        Raises: NotFound.
        """
        await self._delete(FileRecord, caller, name)
        with suppress(NotFound):
            await self._delete(FileRecord, caller, name + TEXT)

    async def files(
        self, caller: str, *, after: str | None, limit: int, order: Literal["asc", "desc"], purpose: str | None
    ) -> tuple[list[tuple[str, FileRecord]], bool]:
        """At most `limit` files after the file `after`, and whether there are more.

        Raises: NotFound for an `after` that is not there.
        """
        tenant = self.tenant(caller)
        prefix = f"{'oldest' if order == 'asc' else 'newest'}/{tenant}/"
        place = ""
        if after is not None:
            made = (await self.file(caller, after)).made_at
            place = f"{prefix}{moment(made) if order == 'asc' else remote_moment(made)}/{after}"
        files: list[tuple[str, FileRecord]] = []
        while len(files) <= limit:
            keys, some = await self.change(partial(_some, prefix=prefix, after=place))
            files += [(name, record) for name, record in some if purpose in (None, record.details.purpose)]
            if len(keys) < PAGE:
                break
            place = keys[-1]
        return files[:limit], len(files) > limit

    async def add_file(
        self,
        ledger: FileLedger,
        name: str,
        upload: UploadRecord,
        blob: str,
        ends: float | None = None,
        sections: int = 0,
    ) -> FileRecord:
        """Add the file that an upload has become, which begins to live now, perhaps with an end and `sections` given.

        Raises: ServiceError (429, 507).
        """
        if ends is None:
            lives = upload.details.lives_s or self.limits.file_s
            ends = ledger.now + lives if lives else 0.0
        segments = (Segment(blob, upload.length),)
        record = FileRecord(upload.tenant, upload.details, upload.length, ledger.now, ends, segments, sections)
        await ledger.save(name, record)
        return record


async def _some(ledger: FileLedger, prefix: str, after: str) -> tuple[list[str], list[tuple[str, FileRecord]]]:
    """The next keys of a caller's files, and the names and records of those that have not expired."""
    keys = [key for key, _ in await ledger.transaction.scan(prefix, PAGE, after)]
    names = [key.rpartition("/")[2] for key in keys]
    records = zip(names, await ledger.find_all(FileRecord, names), strict=True)
    return keys, [(name, record) for name, record in records if record and not 0 < record.expires_at <= ledger.now]


def known(name: str) -> str:
    """Check an id before it stands in a key.

    Raises: NotFound for one that this service never gives.
    """
    if not _ID.fullmatch(name):
        raise NotFound(f"there is no {name[:80]!r}; it was deleted, has expired, or never was")
    return name


def pending(record: UploadRecord) -> UploadRecord:
    """Return the record, if its upload is pending.

    Raises: ServiceError (409) when the upload takes nothing any more.
    """
    if record.state != "pending":
        raise Conflict(f"the upload is {record.state}, and takes nothing any more")
    return record
