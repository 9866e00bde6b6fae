"""Room for bytes that are on their way as a file: held while they come, charged or given back after."""

from typing import final

from dist_attn.store.ledger import changed
from dist_attn.store.ports import new_name
from dist_attn_service.base.errors import Code, ServiceError, TooLarge
from dist_attn_service.uploads.catalogue import Catalogue, known, new_id
from dist_attn_service.uploads.ledger import BlobRecord, Details, FileLedger, FileRecord, Segment, UploadRecord


@final
class Reservations:
    """The reservations of blobs, each recorded before its first byte, so that what a dead process leaves is known."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue

    async def for_file(self, caller: str, room: int) -> str:
        """Reserve a new blob for a file that is sent in one request, of at most `room` bytes for now.

        Raises: ServiceError (429, 507).
        """
        blob, tenant = new_name(self._catalogue.clock()), self._catalogue.tenant(caller)

        async def enter(ledger: FileLedger) -> None:
            await ledger.save(blob, BlobRecord(tenant, "", ledger.now, held=max(1, room)))

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
            held = await ledger.blob(blob)
            await ledger.save(blob, changed(held, held=room), held)
            return room

        wanted = min(most, max(size, ahead))
        try:
            return await self._catalogue.change(lambda ledger: enter(ledger, wanted))
        except ServiceError as error:
            if wanted == size or error.code not in (Code.INSUFFICIENT_QUOTA, Code.DISK_FULL):
                raise
        return await self._catalogue.change(lambda ledger: enter(ledger, size))

    async def into_file(self, caller: str, blob: str, size: int, details: Details) -> tuple[str, FileRecord]:
        """Make the blob a file of so many bytes, and return its id and record.

        Raises: NotFound; ServiceError (429, 507).
        """
        name = new_id("file-")

        async def enter(ledger: FileLedger) -> FileRecord:
            held = await ledger.blob(blob)
            await ledger.save(blob, changed(held, held=0), held)
            record = self._catalogue.new_file(ledger, held.tenant, details, Segment(blob, size))
            await ledger.add_file(name, record)
            return record

        return name, await self._catalogue.change(enter)

    async def for_stream(self, caller: str, upload: str) -> UploadRecord:
        """Give the upload a blob unless it has one, and return its record.

        Raises: NotFound; ServiceError (409) when it takes nothing any more.
        """

        async def enter(ledger: FileLedger, before: UploadRecord) -> UploadRecord:
            blob = before.blob or new_name(ledger.now)
            await ledger.save(blob, BlobRecord(before.tenant, f"upload/{upload}", ledger.now))
            return changed(before, blob=blob)

        return await self._catalogue.change_upload(caller, upload, enter)

    async def give_up(self, blob: str) -> None:
        """Give back the reservation and the bytes of a blob that does not come."""

        async def leave(ledger: FileLedger) -> None:
            record = await ledger.find(BlobRecord, known(blob))
            if record is not None and record.held:
                await ledger.release(blob, record)

        await self._catalogue.change(leave)
