"""Uploads of earlier versions that nobody can go on with: those in parts, cancelled ones, and forms that broke off."""

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import msgspec

from dist_attn.store.ledger import Record, Sums, all_records, all_values, name_in, of_tenant
from dist_attn.store.ports import born_at
from dist_attn_service.uploads.byte_files import ByteFolder
from dist_attn_service.uploads.catalogue import Catalogue
from dist_attn_service.uploads.ledger import FileLedger, UploadRecord, Usage

MOST_PARTS = 10_000


class _Upload(UploadRecord, frozen=True):
    """An upload with the fields of its parts: `received` bytes were in whole ones, `writing` on their way."""

    kind: str = ""
    received: int = 0
    writing: int = 0

    @property
    def charge(self) -> int:
        return max(super().charge, self.received + self.writing) if self.state == "pending" else 0


class _Blob(Record, frozen=True):
    """The bytes of a part or a form that was being written, which were `held` for it."""

    KIND: ClassVar[str] = "blob"
    tenant: str
    owner: str
    held: int = 0

    def index(self, name: str) -> tuple[str, ...]:
        return (f"held/{name}",)

    def sums(self) -> Mapping[str, Sums]:
        return {} if self.owner else of_tenant(self.tenant, Usage(self.held))


async def forget_parts(catalogue: Catalogue, folder: ByteFolder) -> None:
    """Forget such uploads, with the bytes of their parts.

    Raises: StorageError; ServiceError (507).
    """
    for name, record in (await all_records(catalogue.records, _Upload)).items():
        if record.state == "cancelled" or (record.state == "pending" and (record.kind == "parts" or record.writing)):
            await catalogue.change(partial(_forget, name=name))


async def release_held(catalogue: Catalogue, folder: ByteFolder, born_before: float) -> None:
    """Let go of what forms of replicas of before held, began before that time and do not write any more.

    Raises: as `forget_parts`.
    """
    for blob in map(name_in, await all_values(catalogue.records, "held/")):
        if born_at(blob) <= born_before and not await folder.is_written(blob):
            await catalogue.change(partial(_release, blob=blob))


async def _forget(ledger: FileLedger, name: str) -> None:
    record = await ledger.find(_Upload, name)
    for key, value in await ledger.transaction.scan(f"part/{name}/", MOST_PARTS):
        part: dict[str, Any] = msgspec.json.decode(value)
        ledger.transaction.delete(key)
        ledger.transaction.delete(f"blob/{part['segment']['blob']}")
        ledger.dropped.append(part["segment"]["blob"])
    if record is not None:
        await ledger.drop(name, record)


async def _release(ledger: FileLedger, blob: str) -> None:
    if (record := await ledger.find(_Blob, blob)) is not None:
        await ledger.forget(blob, record)
        ledger.dropped.append(blob)
