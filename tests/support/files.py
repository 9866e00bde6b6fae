"""Uploads by hand: resumable ones over raw sockets, and the catalogue behind a service."""

import asyncio
import contextlib
import socket
import struct
from collections import Counter
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from dist_attn_service.uploads.byte_files import ByteFolder
from dist_attn_service.uploads.catalogue import Catalogue
from dist_attn_service.uploads.ledger import FileRecord, UploadRecord, Usage
from dist_attn_service.uploads.service import CATALOGUE, NAMESPACE, FileService, this_boot

from dist_attn.settings import FileSettings
from dist_attn.store import ExpiryGrace, open_records
from dist_attn.store.ledger import all_records, all_values, name_in, wrong_sums
from tests.support.raw_http import Answer, head
from tests.support.stores import Clock

__all__ = ["STREAM", "audit", "begin", "break_off", "offset_of", "opened_files", "patch", "patch_head", "wrong_in"]

STREAM = "application/offset+octet-stream"


def begin(url: str, length: int, **headers: str) -> str:
    """The address of a new resumable upload."""
    given = {"Tus-Resumable": "1.0.0", "Upload-Length": str(length), **headers}
    answer = httpx.post(f"{url}/v1/uploads", headers=given, timeout=60)
    assert answer.status_code == 201, answer.text
    return url + answer.headers["location"]


def patch(address: str, offset: int, data: Any, **headers: str) -> httpx.Response:
    """Go on with an upload."""
    given = {"Tus-Resumable": "1.0.0", "Upload-Offset": str(offset), "Content-Type": STREAM, **headers}
    return httpx.patch(address, headers=given, content=data, timeout=60)


def offset_of(address: str, **headers: str) -> int:
    """Where an upload stands."""
    answer = httpx.head(address, headers=headers, timeout=60)
    assert answer.status_code == 200
    return int(answer.headers["upload-offset"])


def patch_head(address: str, offset: int, length: int) -> bytes:
    """The head of a PATCH, for a raw connection."""
    path = "/" + address.split("/", 3)[3]
    return head(
        path, f"Upload-Offset: {offset}", f"Content-Type: {STREAM}", f"Content-Length: {length}", method="PATCH"
    )


def break_off(connection: socket.socket, answer: Answer | None = None) -> None:
    """End a connection so that the other side gets a reset; `answer` is what is being read from it."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    if answer is not None:
        answer.close()
    connection.close()


@contextlib.asynccontextmanager
async def opened_files(
    folder: Path, *, catalogue: str = "", boot: str = "", clock: Clock | None = None, grace_s: float = 0, **limits: Any
) -> AsyncIterator[FileService]:
    """The files of a folder, without routes in front of them; what has expired goes after `grace_s`."""
    clock = clock or Clock()
    with ThreadPoolExecutor(4) as threads:
        files = ByteFolder(folder / "bytes", threads)
        records = await open_records(catalogue or str(folder), CATALOGUE, NAMESPACE)
        try:
            known = await Catalogue.open(records, FileSettings(**limits), files, clock)
            yield FileService(known, files, boot or this_boot(), ExpiryGrace(grace_s, clock, clock.monotonic))
        finally:
            await records.close()


async def audit(service: FileService) -> list[str]:
    """Say in words what of sums, blobs and bytes does not agree."""
    records, folder = service.catalogue.records, service._folder
    uploads, files = await all_records(records, UploadRecord), await all_records(records, FileRecord)
    known = {name_in(key) for key in await all_values(records, "blob/")}
    named = [blob for upload in uploads.values() for blob in upload.blobs]
    named += [blob for file in files.values() for blob in file.blobs]
    wrong = [f"blob {name} is in no upload and no file" for name in known.difference(named)]
    wrong += [f"blob {name} is not in the list" for name in set(named) - known]
    wrong += [f"blob {name} is named twice" for name, times in Counter(named).items() if times > 1]
    for file, segment in ((one, segment) for one in files.values() for segment in one.segments):
        if await folder.size(segment.blob) != segment.size + file.sections:
            wrong.append(f"blob {segment.blob} does not have {segment.size} bytes")
    return wrong + await wrong_sums(records, Usage, (*uploads.values(), *files.values()))


def wrong_in(folder: Path) -> list[str]:
    """What is wrong in the catalogue of a service, and which bytes are left that it does not know."""

    async def look() -> list[str]:
        async with opened_files(folder) as service:
            swept = await service.upkeep._remove_unknown()
            return [*await audit(service), *(["bytes were left"] if swept else [])]

    return asyncio.run(look())
