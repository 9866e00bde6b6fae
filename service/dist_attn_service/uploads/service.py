"""Files and uploads as routes use them: bytes are on disk and recorded before the client has its answer."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager, suppress
from functools import partial
from typing import final

import msgspec

from dist_attn.store import ExpiryGrace, open_records
from dist_attn.store.ledger import changed
from dist_attn.store.ports import new_name
from dist_attn.text.documents import Section
from dist_attn_service.base.errors import Conflict, NotFound, TooLarge
from dist_attn_service.base.logs import Log
from dist_attn_service.base.settings import Settings
from dist_attn_service.base.tasks import stop_tasks
from dist_attn_service.http.exchange import RequestBody
from dist_attn_service.uploads.byte_files import BlobWriter, ByteFolder, Reader, arriving, this_boot
from dist_attn_service.uploads.catalogue import COMPLETED_S, TEXT, Catalogue, Notes
from dist_attn_service.uploads.earlier import forget_parts
from dist_attn_service.uploads.ledger import (
    Details,
    FileRecord,
    Segment,
    UploadRecord,
)
from dist_attn_service.uploads.multipart import Form, read_form
from dist_attn_service.uploads.reservations import Reservations
from dist_attn_service.uploads.tus import OFFSET
from dist_attn_service.uploads.upkeep import UploadUpkeep

THREADS = 4
CATALOGUE, NAMESPACE = "files.sqlite", "dist-attn-files"  # of records in a folder, and in Redis
FIRST_BYTES = 1  # reserved at first for a file of unknown length
ROOM_BYTES = 64 << 20  # the most that is then reserved at a time
FORM_BYTES = 4 << 10  # about what a form has beside its file


@final
class FileService:
    """All files and uploads of a service, which any number of processes may share."""

    def __init__(self, catalogue: Catalogue, folder: ByteFolder, boot: str, grace: ExpiryGrace) -> None:
        self._folder = folder
        self._boot = boot
        self._reservations = Reservations(catalogue)
        self.catalogue = catalogue
        self.upkeep = UploadUpkeep(catalogue, folder, grace)

    @staticmethod
    @asynccontextmanager
    async def opened(settings: Settings, log: Log) -> AsyncIterator["FileService"]:
        """The service that the settings name, which is kept in order while it is open.

        Raises: StorageError, ConfigError; ServiceError (507) when it cannot be put in order.
        """
        place = settings.files_folder
        with ThreadPoolExecutor(THREADS, thread_name_prefix="files") as threads:
            folder = ByteFolder(place / "bytes", threads)
            records = await open_records(settings.files.catalogue or str(place), CATALOGUE, NAMESPACE)
            try:
                catalogue = await Catalogue.open(records, settings.files, folder)
                await forget_parts(catalogue, folder)
                service = FileService(catalogue, folder, this_boot(), ExpiryGrace(settings.expired_seconds))
                await service.upkeep.sweep()
                keeper = asyncio.create_task(service.upkeep.repeat(settings.files.upkeep_s, log))
                try:
                    yield service
                finally:
                    await stop_tasks(keeper)
            finally:
                await records.close()

    # ---- uploads -------------------------------------------------------------------------------

    async def standing(self, caller: str, name: str) -> UploadRecord:
        """Find an upload; if a process died between its last byte and the making of the file, make the file now.

        Raises: NotFound; ServiceError (507).
        """
        record = await self.catalogue.upload(caller, name)
        if record.state != "pending" or not record.blob or await self.offset(record) < record.length:
            return record
        async with self._folder.writing(record.blob) as writer:
            await writer.sync()
            record = await self.catalogue.upload(caller, name)
            if record.state == "pending" and self._trusted(record, writer.end) == record.length:
                record = await self.catalogue.complete(caller, name)
            return record

    async def offset(self, record: UploadRecord) -> int:
        """The number of bytes of an upload that are on disk."""
        if record.state == "completed":
            return record.length
        return self._trusted(record, await self._folder.size(record.blob)) if record.blob else 0

    async def append(
        self,
        caller: str,
        name: str,
        offset: int,
        body: RequestBody,
        announced: int | None,
        reader: Reader | None = None,
    ) -> tuple[UploadRecord, int]:
        """Go on with an upload at this byte, and complete it with its last; return its record and the bytes received.

        `announced` is how many bytes the body says it has. However this ends, all that has arrived is kept. No more is
        taken than `reader` can keep up with.

        Raises: NotFound, TooLarge; ServiceError (409) for another offset; what the body raises.
        """
        blob = (await self._stream(caller, name)).blob
        async with self._folder.writing(blob) as writer:
            # Read again, now that no other request writes.
            record = await self._stream(caller, name)
            begin = self._trusted(record, writer.end)
            if offset != begin:
                raise Conflict(
                    f"{OFFSET} is {offset}, and the upload stands at {begin}; go on there",
                    param=OFFSET,
                    headers={OFFSET.lower(): str(begin)},
                )
            if announced is not None and begin + announced > record.length:
                raise _too_long(record.length)
            await writer.cut(begin)
            if begin > record.synced:  # what a process that died has written may be in the system's memory alone
                await writer.sync()
            await self._record_synced(caller, name, begin)
            if reader is not None:
                writer.on_flushed = reader.reached
                reader.reached(begin)
            try:
                await self._receive(caller, name, record.length, body, writer, reader)
            finally:
                await writer.flush()
            await writer.sync()
            record = await self._record_synced(caller, name, writer.end)
            if writer.end == record.length:
                record = await self.catalogue.complete(caller, name)
            return record, writer.end

    async def _receive(
        self, caller: str, name: str, length: int, body: RequestBody, writer: BlobWriter, reader: Reader | None
    ) -> None:
        synced = writer.end
        async for chunk in arriving(body, writer):
            if writer.end + len(chunk) > length:
                raise _too_long(length)
            await writer.write(chunk)
            if reader is not None:
                await reader.keep_up(writer)
            if writer.end - synced >= self.catalogue.limits.sync_bytes:
                await writer.sync()
                synced = writer.end
                await self._record_synced(caller, name, synced)

    async def _record_synced(self, caller: str, name: str, synced: int) -> UploadRecord:
        """Record the bytes of a stream that are on disk, and the machine's start in which later ones are written."""
        ends = self.catalogue.clock() + self.catalogue.limits.upload_s
        note = partial(changed, synced=synced, boot=self._boot, expires_at=ends)
        return await self.catalogue.change_upload(caller, name, note)

    async def _stream(self, caller: str, name: str) -> UploadRecord:
        """The record of an upload that takes bytes, with the blob for them."""
        blob = new_name(self.catalogue.clock())
        return await self.catalogue.change_upload(caller, name, lambda one: changed(one, blob=one.blob or blob))

    def _trusted(self, record: UploadRecord, size: int) -> int:
        """The number of bytes of a stream of this size that are surely those sent."""
        return min(size, record.length if record.boot == self._boot else record.synced)

    async def fed_from(self, caller: str, name: str) -> tuple[UploadRecord, tuple[Segment, ...], int]:
        """The record of an upload that is read while it arrives, its segments, and the number of bytes received.

        Raises: NotFound, also for a file that was deleted; ServiceError (409) when it takes nothing any more.
        """
        record = await self.catalogue.upload(caller, name)
        if record.state == "completed":
            return record, (await self.catalogue.file(caller, record.file)).segments, record.length
        record = await self._stream(caller, name)
        return record, (Segment(record.blob, record.length),), await self.offset(record)

    async def note_feed(
        self, caller: str, name: str, feed: Notes, segments: tuple[Segment, ...] = (), size: int = 0
    ) -> None:
        """Keep the notes of who reads an upload, which stays for that, after so many bytes of it are synced to disk.

        Raises: NotFound; ServiceError (507).
        """
        for segment in segments if size else ():
            await self._folder.sync(segment.blob)
        now, limits = self.catalogue.clock(), self.catalogue.limits

        def noted(before: UploadRecord) -> UploadRecord:
            if before.state != "pending":
                return changed(before, feed=feed, expires_at=max(before.expires_at, now + COMPLETED_S))
            ends, synced = max(before.expires_at, now + limits.upload_s), max(before.synced, size)
            return changed(before, feed=feed, expires_at=ends, synced=synced)

        await self.catalogue.change_upload(caller, name, noted, ended=True)

    # ---- files ---------------------------------------------------------------------------------

    async def add_file(
        self,
        caller: str,
        boundary: bytes,
        body: RequestBody,
        announced: int | None,
        fields: tuple[str, ...],
        details: Callable[[Form], Details],
    ) -> tuple[str, FileRecord]:
        """Add a file from the field `file` of a form, whose other fields give its details.

        Raises: BadRequest, TooLarge; ServiceError (429, 507); what `details` and the body raise.
        """
        most = self.catalogue.limits.file_bytes
        held = FIRST_BYTES if announced is None else max(1, min(announced, most) - FORM_BYTES)
        blob = await self._reservations.for_file(caller, held)
        room = self._room(blob, held, exact=announced is not None)
        async with self._kept(blob) as writer:
            form = await read_form(body, boundary, writer, file_field="file", fields=fields, room_for=room)
            described = details(form)
            await writer.sync()
            return await self._reservations.into_file(blob, writer.end, described)

    async def text_file(
        self,
        caller: str,
        name: str,
        record: FileRecord,
        text_of: Callable[[AsyncGenerator[bytes], list[Section]], AsyncGenerator[bytes]],
    ) -> FileRecord:
        """The file of a document's text, named as it with TEXT behind; made once, and deleted with the document.

        Raises: NotFound, TooLarge; ServiceError (415, 429, 507).
        """
        with suppress(NotFound):
            return await self.catalogue.file(caller, name + TEXT)
        blob = await self._reservations.for_file(caller, FIRST_BYTES)
        room = self._room(blob, FIRST_BYTES)
        details = changed(record.details, filename=f"{record.details.filename}.txt", mime_type="text/plain")
        sections: list[Section] = []
        pieces = text_of(self.read(record.segments, 0, record.size), sections)
        async with self._kept(blob) as writer, aclosing(pieces):
            async for piece in pieces:
                await room(writer.end + len(piece))
                await writer.write(piece)
            size, told = writer.end, msgspec.json.encode(sections) if sections else b""
            await room(size + len(told))
            await writer.write(told)
            await writer.sync()
            return (await self._reservations.into_file(blob, size, details, name, len(told)))[1]

    async def sections(self, record: FileRecord) -> list[Section]:
        """The pages or headings of a document's text.

        Raises: NotFound when it is deleted meanwhile.
        """
        if not record.sections:
            return []
        start, stop = record.size, record.size + record.sections
        async with aclosing(self.read((Segment(record.blobs[0], stop),), start, stop)) as pieces:
            return msgspec.json.decode(b"".join([piece async for piece in pieces]), type=list[Section])

    def _room(self, blob: str, held: int, *, exact: bool = False) -> Callable[[int], Awaitable[None]]:
        """Make the work that reserves room for a blob which grows; an announced size is reserved exactly.

        So a share can be used up to its last byte.
        """

        async def within(size: int) -> None:
            nonlocal held
            if size > held:
                ahead = size if exact else max(size, min(2 * held, held + ROOM_BYTES))
                held = await self._reservations.more(blob, size, ahead)

        return within

    def read(self, segments: tuple[Segment, ...], start: int, stop: int) -> AsyncGenerator[bytes]:
        """Read bytes [start, stop) of a file, or of an upload as far as it has come, in pieces.

        Raises: NotFound when it is deleted meanwhile.
        """
        return self._folder.read(segments, start, stop)

    @asynccontextmanager
    async def _kept(self, blob: str) -> AsyncIterator[BlobWriter]:
        """Write a blob that has its record; unless the block ends well, both are removed."""
        try:
            async with self._folder.writing(blob) as writer:
                yield writer
        except BaseException:
            await asyncio.shield(self._reservations.give_up(blob))
            raise


def _too_long(length: int) -> TooLarge:
    return TooLarge(f"this upload was announced with {length} bytes; more were sent", param=OFFSET)
