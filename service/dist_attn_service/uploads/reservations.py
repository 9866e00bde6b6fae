"""Room for bytes that are on their way as a part or as a file: held while they come, charged or given back after."""

from typing import final

from dist_attn.store.ledger import changed
from dist_attn.store.ports import new_name
from dist_attn_service.base.errors import BadRequest, Code, Conflict, ServiceError, TooLarge
from dist_attn_service.uploads.catalogue import Catalogue, known, new_id
from dist_attn_service.uploads.ledger import (
    BlobRecord,
    Details,
    FileLedger,
    FileRecord,
    PartRecord,
    Segment,
    UploadRecord,
)

TIMES_RECEIVED = 3  # an upload takes so many times its announced bytes, as a part whose answer was lost comes again


@final
class Reservations:
    """The reservations of blobs, each recorded before its first byte, so that what a dead process leaves is known."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue

    async def for_part(self, caller: str, upload: str, most: int) -> tuple[str, int]:
        """Reserve a new blob for a part of at most `most` bytes; return its name, and how many it may have.

        Raises: NotFound, BadRequest; ServiceError (409, 429, 507).
        """
        limits = self._catalogue.limits
        blob, room = new_name(self._catalogue.clock()), 0

        async def enter(ledger: FileLedger, before: UploadRecord) -> UploadRecord:
            nonlocal room
            if before.kind == "stream" or before.feed is not None:
                raise Conflict("the bytes of this upload come by PATCH; send parts to another one")
            if before.parts >= limits.upload_parts:
                raise BadRequest(f"an upload may have {limits.upload_parts} parts; send larger ones", param="data")
            room = min(most, limits.part_bytes, before.length)
            if before.received + room > TIMES_RECEIVED * before.length:
                raise BadRequest(
                    f"{before.received} bytes have come for an upload of {before.length}; complete it, or cancel it",
                    param="data",
                )
            await ledger.save(blob, BlobRecord(before.tenant, f"upload/{upload}", ledger.now, held=max(1, room)))
            return changed(before, writing=before.writing + max(1, room))

        await self._catalogue.change_upload(caller, upload, enter)
        return blob, room

    async def into_part(self, caller: str, upload: str, blob: str, size: int) -> str:
        """Make the blob a part of so many bytes, and return the part's id.

        Raises: NotFound; ServiceError (409) when the upload has changed meanwhile.
        """
        part = new_id("part_")

        async def enter(ledger: FileLedger, before: UploadRecord) -> UploadRecord:
            held = await ledger.blob(blob)
            if before.kind == "stream":
                raise Conflict("the bytes of this upload come by PATCH since this part began")
            await ledger.save(blob, changed(held, held=0), held)
            await ledger.save(f"{upload}/{part}", PartRecord(Segment(blob, size), ledger.now))
            ends = ledger.now + ledger.limits.upload_s
            writing, received = before.writing - held.held, before.received + size
            return changed(
                before, kind="parts", parts=before.parts + 1, writing=writing, received=received, expires_at=ends
            )

        await self._catalogue.change_upload(caller, upload, enter)
        return part

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
            record = self._catalogue.new_file(ledger, held.tenant, details, (Segment(blob, size),))
            await ledger.add_file(name, record)
            return record

        return name, await self._catalogue.change(enter)

    async def for_stream(self, caller: str, upload: str) -> UploadRecord:
        """Make the upload one whose bytes come as one stream, and return its record.

        Raises: NotFound; ServiceError (409) when it has parts, or takes nothing any more.
        """

        async def enter(ledger: FileLedger, before: UploadRecord) -> UploadRecord:
            if before.kind == "parts":
                raise Conflict("the bytes of this upload come as parts; send the next one to /parts")
            blob = before.blob or new_name(ledger.now)
            await ledger.save(blob, BlobRecord(before.tenant, f"upload/{upload}", ledger.now))
            return changed(before, kind="stream", blob=blob)

        return await self._catalogue.change_upload(caller, upload, enter)

    async def give_up(self, blob: str) -> None:
        """Give back the reservation and the bytes of a blob that does not come."""

        async def leave(ledger: FileLedger) -> None:
            record = await ledger.find(BlobRecord, known(blob))
            if record is not None and record.held:
                await ledger.release(blob, record)

        await self._catalogue.change(leave)
