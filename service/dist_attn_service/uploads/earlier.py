"""Uploads of earlier versions that nobody can go on with: those in parts, and cancelled ones."""

from functools import partial
from typing import Any

import msgspec

from dist_attn.store.ledger import all_records
from dist_attn_service.uploads.catalogue import Catalogue
from dist_attn_service.uploads.ledger import FileLedger, UploadRecord

MOST_PARTS = 10_000


class _Upload(UploadRecord, frozen=True):
    """An upload with the fields of its parts: `received` bytes were in whole ones, `writing` on their way."""

    kind: str = ""
    received: int = 0
    writing: int = 0

    @property
    def charge(self) -> int:
        return max(super().charge, self.received + self.writing) if self.state == "pending" else 0


async def forget_parts(catalogue: Catalogue) -> None:
    """Forget such uploads, with the bytes of their parts.

    Raises: StorageError; ServiceError (507).
    """
    for name, record in (await all_records(catalogue.records, _Upload)).items():
        if record.state == "cancelled" or (record.state == "pending" and (record.kind == "parts" or record.writing)):
            await catalogue.change(partial(_forget, name=name))


async def _forget(ledger: FileLedger, name: str) -> None:
    record = await ledger.find(_Upload, name)
    for key, value in await ledger.transaction.scan(f"part/{name}/", MOST_PARTS):
        part: dict[str, Any] = msgspec.json.decode(value)
        ledger.transaction.delete(key)
        ledger.drop_blob(part["segment"]["blob"])
    if record is not None:
        await ledger.drop_upload(name, record)
