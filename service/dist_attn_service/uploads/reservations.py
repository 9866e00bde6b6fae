"""Room for bytes on their way: reserved before the first of them, so that what a dead process leaves is known."""

from typing import final

from dist_attn.store.ledger import changed
from dist_attn.store.ports import new_name
from dist_attn_service.base.errors import Code, NotFound, ServiceError, TooLarge
from dist_attn_service.uploads.catalogue import TEXT, Catalogue, new_id
from dist_attn_service.uploads.ledger import Details, FileLedger, FileRecord, UploadRecord


@final
class Reservations:
    """The blobs that are written to. A file that comes in a form is an upload under the name of its blob."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue

    async def for_file(self, caller: str, room: int) -> str:
        """Reserve a new blob for a file that is sent in one request, of at most `room` bytes for now.

        Raises: ServiceError (429, 507).
        """
        blob, tenant = new_name(self._catalogue.clock()), self._catalogue.tenant(caller)

        async def enter(ledger: FileLedger) -> None:
            details, now = Details("", "", ""), ledger.now
            await ledger.save(blob, UploadRecord(tenant, room, details, now, 0.0, blob=blob, is_form=True))

        await self._catalogue.change(enter)
        return blob

    async def more(self, blob: str, size: int, ahead: int) -> int:
        """Reserve `ahead` bytes in all for a file that is longer than was known, or `size` where so many are not free.

        Raises: NotFound, TooLarge; ServiceError (429, 507).
        """
        most = self._catalogue.limits.file_bytes
        if size > most:
            raise TooLarge(f"a file may have {most} bytes; more were sent", param="file")

        async def enter(ledger: FileLedger, room: int) -> int:
            held = await _form(ledger, blob)
            await ledger.save(blob, changed(held, length=room), held)
            return room

        wanted = min(most, max(size, ahead))
        try:
            return await self._catalogue.change(lambda ledger: enter(ledger, wanted))
        except ServiceError as error:
            if wanted == size or error.code not in (Code.INSUFFICIENT_QUOTA, Code.DISK_FULL):
                raise
        return await self._catalogue.change(lambda ledger: enter(ledger, size))

    async def into_file(
        self, blob: str, size: int, details: Details, document: str = "", sections: int = 0
    ) -> tuple[str, FileRecord]:
        """Make the blob a file of so many bytes, and return its id and record.

        The text of a `document`, with so many bytes of sections behind it, ends with it; one that is there stays.

        Raises: NotFound, also where the document is not there any more; ServiceError (429, 507).
        """
        name = document + TEXT if document else new_id("file-")

        async def enter(ledger: FileLedger) -> FileRecord:
            held, ends = await _form(ledger, blob), None
            if document:
                ends = (await ledger.owned(FileRecord, held.tenant, document)).expires_at
            if (made := await ledger.find(FileRecord, name)) is not None:
                await ledger.drop(blob, held)
                return made
            await ledger.forget(blob, held)
            upload = changed(held, length=size, details=details)
            return await self._catalogue.add_file(ledger, name, upload, blob, ends, sections)

        return name, await self._catalogue.change(enter)

    async def give_up(self, blob: str) -> int:
        """Drop the form that writes this blob; return how many there were, 0 or 1."""

        async def leave(ledger: FileLedger) -> int:
            if (record := await ledger.find(UploadRecord, blob)) is None:
                return 0
            await ledger.drop(blob, record)
            return 1

        return await self._catalogue.change(leave)


async def _form(ledger: FileLedger, blob: str) -> UploadRecord:
    """The record of a form. Raises: NotFound when it was given up."""
    record = await ledger.find(UploadRecord, blob)
    if record is None:
        raise NotFound("what these bytes were sent for was deleted or has expired meanwhile")
    return record
