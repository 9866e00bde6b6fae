"""The upkeep of the folder and its catalogue: it removes what has expired, and what dead processes left behind."""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import final

from dist_attn.store import ExpiryGrace
from dist_attn.store.ledger import all_values, every_page, name_in
from dist_attn.store.ports import born_at
from dist_attn_service.base.logs import Log, warn_of_jump
from dist_attn_service.uploads.byte_files import ByteFolder
from dist_attn_service.uploads.catalogue import Catalogue
from dist_attn_service.uploads.earlier import release_held
from dist_attn_service.uploads.ledger import FileLedger, FileRecord, UploadRecord
from dist_attn_service.uploads.reservations import Reservations

KINDS: Mapping[str, type[UploadRecord | FileRecord]] = {"upload": UploadRecord, "file": FileRecord}
BATCH = 64  # entries that are removed in one transaction
PAGE = 500
BEGINNING_S = 300.0  # the most between the name of bytes that will come and their writer's lock


@dataclass(frozen=True)
class Swept:
    """The counts of what one round removed."""

    uploads: int = 0
    files: int = 0
    blobs: int = 0


@final
class UploadUpkeep:
    """The rounds of upkeep, which any process that shares the folder may do at any time."""

    def __init__(self, catalogue: Catalogue, folder: ByteFolder, grace: ExpiryGrace) -> None:
        self._catalogue = catalogue
        self._folder = folder
        self._reservations = Reservations(catalogue)
        self.grace = grace

    async def sweep(self) -> Swept:
        """Do one round.

        Raises: ServiceError (507) when the catalogue cannot be read or written.
        """
        until = self.grace.deletable_until
        until()  # a jump of the clock is noticed in each round, also where nothing has expired
        change = self._catalogue.change
        pages = await every_page(lambda after: change(lambda ledger: _end_expired(ledger, after, until)))
        ended = sum(pages, Counter[str]())
        await release_held(self._catalogue, self._folder, self._catalogue.clock() - BEGINNING_S)
        return Swept(ended["upload"], ended["file"], await self._give_up_unwritten() + await self._remove_unknown())

    async def repeat(self, every_s: float, log: Log) -> None:
        """Do a round every `every_s` seconds, until cancelled; one that fails is tried again."""
        while True:
            await asyncio.sleep(every_s)
            try:
                await self.sweep()
                warn_of_jump(log, self.grace, "file or upload")
            except Exception as error:
                log.warning("files could not be put in order; will try again", exc_info=error)

    async def _give_up_unwritten(self) -> int:
        """Drop the forms that are not written any more."""
        given_up = 0
        for key in await all_values(self._catalogue.records, "form/"):
            blob = name_in(key)
            if born_at(blob) + BEGINNING_S <= self._catalogue.clock() and not await self._folder.is_written(blob):
                given_up += await self._reservations.give_up(blob)
        return given_up

    async def _remove_unknown(self) -> int:
        """Delete bytes that no record names; every record is there before its bytes."""
        names, removed = await self._folder.names(), 0
        for at in range(0, len(names), PAGE):
            some = names[at : at + PAGE]
            unknown = await self._catalogue.change(partial(_unknown, names=some))
            await self._folder.delete(unknown)
            removed += len(unknown)
        return removed


async def _end_expired(
    ledger: FileLedger, after: str, deletable_until: Callable[[float], float]
) -> tuple[Counter[str], str]:
    """Drop those of one page of expired entries whose grace is over; return their counts and the next page's key."""
    ended: Counter[str] = Counter()
    keys, last = await ledger.due("expiry/", after, BATCH)
    for key in keys:
        kind, name = key.split("/")[2:]
        record = await ledger.find(KINDS[kind], name)
        if record is None:
            ledger.transaction.delete(key)
        elif record.expires_at <= deletable_until(record.expires_at - record.made_at):
            await ledger.drop(name, record)
            ended[kind] += 1
    return ended, last


async def _unknown(ledger: FileLedger, names: list[str]) -> list[str]:
    if await ledger.transaction.get("secret") is None:  # a catalogue that was emptied meanwhile knows none
        return []
    values = await ledger.transaction.get_many(f"blob/{name}" for name in names)
    return [name for name, value in zip(names, values, strict=True) if value is None]
