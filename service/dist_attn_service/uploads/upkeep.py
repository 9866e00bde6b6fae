"""Keeps the folder and its catalogue in order: what has expired goes, and what processes left behind when they died."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from dist_attn.store import ExpiryGrace
from dist_attn_service.uploads.books import Books
from dist_attn_service.uploads.byte_files import ByteFolder
from dist_attn_service.uploads.catalogue import Catalogue
from dist_attn_service.uploads.entries import BlobRecord, FileRecord, UploadRecord, decode, moment

__all__ = ["Upkeep"]

BATCH = 64  # ends in one transaction
PAGE = 500
BEGINNING_S = 300.0  # between the record of bytes that will come and the lock of who writes them


@dataclass(frozen=True)
class Swept:
    """What one round removed."""

    uploads: int = 0
    files: int = 0
    blobs: int = 0


@final
class Upkeep:
    """Any process that shares the folder may do this, at any time."""

    def __init__(self, catalogue: Catalogue, folder: ByteFolder, grace: ExpiryGrace) -> None:
        self._catalogue = catalogue
        self._folder = folder
        self.grace = grace

    async def sweep(self) -> Swept:
        """One round.

        Raises: ServiceError (507) when the catalogue cannot be read or written.
        """
        self.grace.deletable_until()  # a jump of the clock is noticed in each round, also where nothing has expired
        uploads = files = 0
        after, more = "", True
        while more:
            ended, after, more = await self._catalogue.change(
                lambda books, after=after: _end_expired(books, after, self.grace.deletable_until)  # type: ignore[misc]
            )
            uploads, files = uploads + ended["upload"], files + ended["file"]
        return Swept(uploads, files, await self._give_up_unwritten() + await self._remove_unknown())

    async def _give_up_unwritten(self) -> int:
        """Release what is held for bytes that nobody writes any more."""
        given_up, after = 0, ""
        while True:
            page = await self._catalogue.change(lambda books, after=after: _held(books, after))  # type: ignore[misc]
            for blob, made_at in page:
                if made_at + BEGINNING_S <= self._catalogue.clock() and not await self._folder.is_written(blob):
                    given_up += await self._catalogue.change(lambda books, blob=blob: _release(books, blob))  # type: ignore[misc]
            if len(page) < PAGE:
                return given_up
            after = f"held/{page[-1][0]}"

    async def _remove_unknown(self) -> int:
        """Delete bytes that no record names; every record is there before its bytes."""
        names, removed = await self._folder.names(), 0
        for at in range(0, len(names), PAGE):
            some = names[at : at + PAGE]
            unknown = await self._catalogue.change(lambda books, some=some: _unknown(books, some))  # type: ignore[misc]
            await self._folder.delete(unknown)
            removed += len(unknown)
        return removed


async def _end_expired(
    books: Books, after: str, deletable_until: Callable[[float], float]
) -> tuple[dict[str, int], str, bool]:
    """Drop those of one page of expired entries whose grace is over: how many, the last key, whether there are more."""
    ended = {"upload": 0, "file": 0}
    page = await books.transaction.scan("expiry/", BATCH, after)
    for key, _ in page:
        _, time, kind, name = key.split("/")
        if time > moment(books.now):
            return ended, "", False
        value, after = await books.transaction.get(f"{kind}/{name}"), key
        if value is None:
            books.transaction.delete(key)
            continue
        record = decode(value, UploadRecord) if kind == "upload" else decode(value, FileRecord)
        if record.expires_at > deletable_until(record.expires_at - record.made_at):
            continue
        if isinstance(record, UploadRecord):
            await books.drop_upload(name, record)
        else:
            await books.drop_file(name, record)
        ended[kind] += 1
    return ended, after, len(page) == BATCH


async def _held(books: Books, after: str) -> list[tuple[str, float]]:
    """Blobs that something is held for, and since when."""
    names = [key.removeprefix("held/") for key, _ in await books.transaction.scan("held/", PAGE, after)]
    return [(name, (await books.blob(name)).made_at) for name in names]


async def _release(books: Books, blob: str) -> int:
    value = await books.transaction.get(f"blob/{blob}")
    if value is None or not (record := decode(value, BlobRecord)).held:
        return 0
    await books.release(blob, record)
    return 1


async def _unknown(books: Books, names: list[str]) -> list[str]:
    if await books.transaction.get("secret") is None:  # a catalogue that was emptied meanwhile says nothing
        return []
    values = await books.transaction.get_many(f"blob/{name}" for name in names)
    return [name for name, value in zip(names, values, strict=True) if value is None]
