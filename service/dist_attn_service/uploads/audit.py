"""Whether the books of uploads and files agree with each other, and with the bytes on disk."""

from dataclasses import dataclass

from dist_attn_service.uploads.books import Books
from dist_attn_service.uploads.byte_files import ByteFolder
from dist_attn_service.uploads.catalogue import Catalogue
from dist_attn_service.uploads.entries import BlobRecord, FileRecord, PartRecord, Segment, UploadRecord, Usage, decode

__all__ = ["audit"]


async def audit(catalogue: Catalogue, folder: ByteFolder) -> list[str]:
    """What is wrong, in words: charges, owners and bytes that do not agree. Nothing is changed.

    Raises: ServiceError (507).
    """
    found = await catalogue.change(_everything)
    wrong: list[str] = []
    sums: dict[str, Usage] = {}
    owned: dict[str, str] = {}
    for key, record in found.uploads.items():
        owned |= {record.blob: key} if record.blob else {}
        for tenant in (record.tenant, ""):
            sums[tenant] = sums.get(tenant, Usage()).plus(size=record.charge, entries=1)
    for key, file in found.files.items():
        owned |= {segment.blob: key for segment in file.segments}
        for tenant in (file.tenant, ""):
            sums[tenant] = sums.get(tenant, Usage()).plus(size=file.size, entries=1)
    owned |= {segment.blob: f"upload/{name}" for name, segment in found.parts}
    for blob, held in found.blobs.items():
        if held.held and not held.owner:
            for tenant in (held.tenant, ""):
                sums[tenant] = sums.get(tenant, Usage()).plus(size=held.held)
        elif not held.held and owned.get(blob) != held.owner:
            wrong.append(f"blob {blob} is {held.owner}'s, and {owned.get(blob)} refers to it")
    wrong += [f"blob {blob} of {owner} has no record" for blob, owner in owned.items() if blob not in found.blobs]
    for file in found.files.values():
        for segment in file.segments:
            if await folder.size(segment.blob) != segment.size:
                wrong.append(f"blob {segment.blob} does not have {segment.size} bytes")
    for tenant in sums.keys() | found.usage.keys():
        if sums.get(tenant, Usage()) != found.usage.get(tenant, Usage()):
            wrong.append(f"usage of {tenant or 'all'} is {found.usage.get(tenant)}, not {sums.get(tenant)}")
    return wrong


@dataclass(frozen=True)
class _Everything:
    uploads: dict[str, UploadRecord]
    files: dict[str, FileRecord]
    parts: list[tuple[str, Segment]]
    blobs: dict[str, BlobRecord]
    usage: dict[str, Usage]


async def _everything(books: Books) -> _Everything:
    most = 1 << 30
    scan = books.transaction.scan
    usage = {key.removeprefix("usage/"): decode(value, Usage) for key, value in await scan("usage/", most)}
    if (total := await books.usage()) != Usage():
        usage[""] = total
    return _Everything(
        {key: decode(value, UploadRecord) for key, value in await scan("upload/", most)},
        {key: decode(value, FileRecord) for key, value in await scan("file/", most)},
        [(key.split("/")[1], decode(value, PartRecord).segment) for key, value in await scan("part/", most)],
        {key.removeprefix("blob/"): decode(value, BlobRecord) for key, value in await scan("blob/", most)},
        usage,
    )
