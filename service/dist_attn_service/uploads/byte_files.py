"""The bytes of files and uploads: written by one request at a time, read in pieces.

A writer holds the file's lock, which the system takes back when a process dies, also on a folder that machines share. A
request that waits for the lock leaves a mark, and a writer whose client sends nothing makes way.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import Executor
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import ParamSpec, Protocol, TypeVar, final

from dist_attn.errors import NO_ROOM
from dist_attn.store.files import MAKE, WANTED, BlobFile, BlobFolder
from dist_attn_service.base.errors import NO_RETRY, Code, NotFound, ServiceError
from dist_attn_service.base.tasks import beside, stop_tasks, unbroken
from dist_attn_service.http.exchange import RequestBody
from dist_attn_service.uploads.ledger import Segment

P = ParamSpec("P")
T = TypeVar("T")
QUIET_SECONDS = 0.5  # after such a pause all that came is flushed to the file, and another request may take over
BLOCK_BYTES = 256 << 10  # one write or read
LOCK_SECONDS = 5.0  # in which a writer has to make way
POLL_SECONDS = 0.05


def this_boot() -> str:
    """An id of this start of the machine: bytes given to the system outlive their process, not the system."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return uuid.uuid4().hex


@final
class ByteFolder:
    """The folder of all blobs; its work is done in threads."""

    def __init__(self, folder: Path, threads: Executor) -> None:
        self._blobs = BlobFolder(folder)
        self._threads = threads
        self.place = folder

    @asynccontextmanager
    async def writing(self, blob: str) -> AsyncIterator["BlobWriter"]:
        """Write to a blob, which is made if it is not there; a request that writes to it is asked to make way.

        Raises: ServiceError (409) when that one does not within LOCK_SECONDS.
        """
        wanted = self._blobs.path(blob + WANTED)
        with ExitStack() as opened:
            file = await self._opened(opened, blob, MAKE)
            await self.beside(self._blobs.sync_names, blob)
            await self._lock(file, wanted)
            yield BlobWriter(file, wanted, self)

    async def _lock(self, file: BlobFile, wanted: Path) -> None:
        """Take the lock. Raises: ServiceError (409) when its holder does not make way."""
        try:
            async with asyncio.timeout(LOCK_SECONDS):
                while not await self.beside(file.lock):
                    await self.beside(wanted.touch, mode=0o600)
                    await asyncio.sleep(POLL_SECONDS)
        except TimeoutError:
            raise ServiceError(
                "another request is writing to this upload; send it again once that one has ended",
                code=Code.CONFLICT,
            ) from None
        await self.beside(wanted.unlink, missing_ok=True)

    async def size(self, blob: str) -> int:
        """The bytes of a blob, 0 where it is not there."""
        return await self.beside(self._blobs.size, blob)

    async def read(self, segments: Iterable[Segment], start: int, stop: int) -> AsyncGenerator[bytes]:
        """Bytes [start, stop) of the segments, one after the other, in pieces.

        Raises: NotFound when a blob was deleted meanwhile.
        """
        for blob, first, last in _within(segments, start, stop):
            with _reading(), ExitStack() as opened:
                file = await self._opened(opened, blob)
                for at in range(first, last, BLOCK_BYTES):
                    piece = await self.beside(file.read_at, at, min(BLOCK_BYTES, last - at))
                    if len(piece) != min(BLOCK_BYTES, last - at):
                        raise NotFound("the file is shorter than it was; it was damaged on disk")
                    yield piece

    async def _opened(self, opened: ExitStack, blob: str, flags: int = 0) -> BlobFile:
        """Open a blob in a thread; `opened` closes it, also for a task that is cancelled meanwhile."""
        return await self.beside(lambda: opened.enter_context(self._blobs.open(blob, flags)))

    async def delete(self, blobs: Iterable[str]) -> None:
        """Remove blobs, as far as they are there; those that cannot be removed now are swept away later."""
        for blob in blobs:
            with suppress(OSError):
                await self.beside(self._blobs.delete, blob)

    async def sync(self, blob: str) -> None:
        """Sync to disk all of a blob that the system has.

        Raises: NotFound when it was deleted.
        """
        with _reading():
            await self.beside(self._blobs.sync, blob)

    async def is_written(self, blob: str) -> bool:
        """Return whether a process holds the blob's lock."""
        return await self.beside(self._blobs.is_locked, blob)

    async def names(self) -> list[str]:
        """The names of all blobs, including those of which only a mark is left."""
        return await self.beside(self._blobs.names)

    async def beside(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of `work`, which is done in a thread even if the task that asked for it is cancelled."""
        return await unbroken(beside(self._threads, work, *args, **kwargs))


@final
class BlobWriter:
    """The one writer of a blob: no other request writes to it meanwhile."""

    def __init__(self, file: BlobFile, wanted: Path, folder: ByteFolder) -> None:
        self._file = file
        self._wanted = wanted
        self._folder = folder
        self._waiting = bytearray()
        self.on_flushed: Callable[[int], None] = lambda _: None
        """Called with the size that others may read."""
        self.end = file.size
        """The place of the next byte, counting those that wait in memory."""

    async def cut(self, size: int) -> None:
        """Drop all after the first `size` bytes."""
        await self._do(self._file.truncate, size)
        self.end = size

    async def write(self, data: bytes) -> None:
        """Append; a block at most waits in memory.

        Raises: ServiceError (507) when the disk is full.
        """
        self._waiting += data
        self.end += len(data)
        if len(self._waiting) >= BLOCK_BYTES:
            await self.flush()

    async def flush(self) -> None:
        """Give the waiting bytes to the system, where they survive the end of this process.

        Raises: ServiceError (507) when the disk is full; bytes written before stay.
        """
        if not self._waiting:
            return
        data, self._waiting = bytes(self._waiting), bytearray()
        start = self.end - len(data)
        try:
            await self._do(self._file.write_at, data, start)
        except BaseException:
            self.end = self._file.size
            raise
        self.on_flushed(start + len(data))

    async def sync(self) -> None:
        """Sync all bytes to the disk, where they survive a power cut.

        Raises: ServiceError (507) when the disk is full.
        """
        await self.flush()
        await self._do(self._file.sync)

    async def make_way(self) -> None:
        """Stop where another request wants to write.

        Raises: ServiceError (409) when one does, or the blob was deleted.
        """
        if await self._do(lambda: self._wanted.exists() or self._file.deleted):
            raise ServiceError(
                "another request goes on with this upload, or it was deleted; ask where it stands before sending more",
                code=Code.CONFLICT,
            )

    async def _do(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        with _writing():
            return await self._folder.beside(work, *args, **kwargs)


def _within(segments: Iterable[Segment], start: int, stop: int) -> Iterator[tuple[str, int, int]]:
    """The parts of segments that lie in [start, stop)."""
    before = 0
    for segment in segments:
        first, last = max(0, start - before), min(segment.size, stop - before)
        if first < last:
            yield segment.blob, first, last
        before += segment.size


@contextmanager
def _writing() -> Iterator[None]:
    """Translate a full disk into an answer. Raises: ServiceError (507)."""
    try:
        yield
    except OSError as error:
        if error.errno in NO_ROOM:
            raise ServiceError(
                "the disk of this service is full; what has arrived is kept, delete files or try again later",
                code=Code.DISK_FULL,
                headers=NO_RETRY,
            ) from None
        raise


@contextmanager
def _reading() -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise NotFound("the file was deleted, or has expired, while it was read") from None


# ---- a body that is written while it arrives -----------------------------------------------------


class Reader(Protocol):
    """A reader of an upload that still arrives."""

    def reached(self, size: int) -> None:
        """Note that so many bytes may be read."""

    async def keep_up(self, writer: BlobWriter) -> None:
        """Wait until reading is not too far behind the writer.

        Raises: ServiceError when the bytes will not be read; what `make_way` raises.
        """


async def arriving(body: RequestBody, writer: BlobWriter) -> AsyncIterator[bytes]:
    """Yield the body, until it ends or another request wants to write.

    Raises: what the body raises; ServiceError (409) when another request is to go on, or the upload was deleted.
    """
    chunks = body.chunks()
    checked_at = time.monotonic()
    waiting: asyncio.Future[bytes] | None = None
    try:
        while True:
            waiting = asyncio.ensure_future(anext(chunks, b""))
            while not (await asyncio.wait({waiting}, timeout=QUIET_SECONDS))[0]:
                await writer.flush()
                await writer.make_way()
            if not (chunk := waiting.result()):
                return
            if time.monotonic() - checked_at > QUIET_SECONDS:
                await writer.make_way()
                checked_at = time.monotonic()
            yield chunk
    finally:
        if waiting is not None and not waiting.done():
            await stop_tasks(waiting)
        await chunks.aclose()
