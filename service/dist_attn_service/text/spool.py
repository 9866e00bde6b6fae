"""A first-in-first-out of bytes between two tasks: a little in memory, the rest on disk, never over its bound."""

from collections import deque
from concurrent.futures import Executor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from dist_attn.errors import NO_ROOM
from dist_attn.store.files import BlobFile
from dist_attn_service.base.errors import Code, ServiceError
from dist_attn_service.base.tasks import Changes, beside

__all__ = ["DiskBudget", "Spool", "SpoolFactory"]

BLOCK_BYTES = 256 << 10  # one write or read of the file
SEGMENT_BYTES = 64 << 20  # files are given back in pieces of this size while a long stream runs
_ADVICE = "read the answer while you send, or send less at once"


class DiskBudget:
    """The bytes of disk that all spools of this process may use together."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0

    def reserve(self, count: int) -> None:
        """Take `count` bytes.

        Raises: ServiceError (507) when the limit would be passed.
        """
        if self.used + count > self.limit:
            raise _disk_full(f"the spools of this service are full ({self.limit} bytes); try again later")
        self.used += count

    def release(self, count: int) -> None:
        """Give `count` bytes back."""
        self.used -= count


class _Segment:
    """One file, which is made by its first append. `append`, `take` and `close` run in the disk thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: BlobFile | None = None
        self.reserved = 0
        self.read = 0

    def append(self, data: bytes, start: int) -> None:
        """Write all of `data` at `start`."""
        if self._file is None:
            self._file = BlobFile.unnamed(self._folder)
        self._file.write_at(data, start)

    def take(self, count: int, start: int) -> bytes:
        """Read `count` bytes from `start`."""
        return b"" if self._file is None else self._file.read_at(start, count)

    def close(self) -> None:
        """Give the disk space back."""
        if self._file is not None:
            self._file.close()


class Spool(AbstractContextManager["Spool"]):
    """A queue of bytes. One task puts, one task reads; bytes that are left are dropped at close.

    Order: `_head` in memory is older than the files, which are older than `_tail`. Disk work runs in a
    single thread, so that a close always comes after a write that was under way.
    """

    def __init__(self, place: "SpoolFactory", what: str, limit: int) -> None:
        self._place = place
        self._what = what
        self._limit = limit
        self._head = bytearray()
        self._segments: deque[_Segment] = deque()
        self._on_disk = 0
        self._tail = bytearray()
        self._flushing = 0
        self._ended = False
        self._dropping = False
        self._error: BaseException | None = None
        self._changed = Changes()
        self.spilled = 0

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def waiting(self) -> int:
        """The number of bytes put and not read yet."""
        return len(self._head) + self._on_disk + self._flushing + len(self._tail)

    async def put(self, data: bytes) -> None:
        """Append; waits for the disk when memory is full.

        Raises: ServiceError (507) when the bytes waiting would pass the limit or the disk is full.
        """
        if self._dropping or not data:
            return
        if self.waiting + len(data) > self._limit:
            raise _disk_full(f"more than {self._limit} bytes of {self._what} are waiting; {_ADVICE}")
        behind = self.waiting - len(self._head)  # on the disk, or on the way to it
        if not behind and len(self._head) + len(data) <= self._place.memory:
            self._head += data
        else:
            self._tail += data
            if len(self._tail) >= BLOCK_BYTES:
                await self._flush()
        self._changed.notify()

    async def below(self, count: int) -> None:
        """Wait until fewer than `count` bytes wait, or none is wanted any more: for a source that can pause."""
        while self.waiting >= count and not self._dropping:
            await self._changed.wait()

    def end(self, last: bytes = b"") -> None:
        """End the bytes; `last` (an error or summary line) is taken even when the spool is full."""
        self._tail += last
        self._ended = True
        self._changed.notify()

    def fail(self, error: BaseException) -> None:
        """Raise `error` in the reader at once, before the bytes that wait; later puts are dropped."""
        self._error = self._error or error
        self._dropping = True
        self._changed.notify()

    async def ready(self) -> None:
        """Wait until there is something to read, or the end.

        Raises: what `fail` was given.
        """
        while not self.waiting and not self._ended and self._error is None:
            await self._changed.wait()
        if self._error is not None:
            raise self._error

    async def read(self, count: int) -> bytes:
        """The next bytes, at most `count`; empty at the end.

        Raises: what `fail` was given.
        """
        while True:
            await self.ready()
            if not self._head and self._on_disk:
                await self._load()
            elif not self._head and not self._flushing and self._tail:
                self._head, self._tail = self._tail, bytearray()
            if self._head:
                data = bytes(memoryview(self._head)[:count])
                del self._head[: len(data)]
                self._changed.notify()
                return data
            if self._ended and not self.waiting:
                return b""
            if self._flushing and not self._on_disk:
                await self._changed.wait()

    def close(self) -> None:
        """Drop the bytes that wait, and give their disk back."""
        self._dropping = True
        while self._segments:
            self._drop_segment()
        self._head.clear()
        self._tail.clear()

    async def _flush(self) -> None:
        """Write the tail to the newest file; its bytes can be read from then on."""
        data = bytes(self._tail)
        self._place.budget.reserve(len(data))
        if not self._segments or self._segments[-1].reserved >= SEGMENT_BYTES:
            self._segments.append(_Segment(self._place.folder))
        segment = self._segments[-1]
        start, segment.reserved = segment.reserved, segment.reserved + len(data)
        self._tail, self._flushing = bytearray(), len(data)
        try:
            await beside(self._place.disk, segment.append, data, start)
            self._on_disk += len(data)
            self.spilled += len(data)
        except OSError as error:
            if error.errno in NO_ROOM:
                raise _disk_full(f"the disk of {self._place.folder} is full; {_ADVICE}") from None
            raise
        finally:
            self._flushing = 0
            self._changed.notify()

    async def _load(self) -> None:
        """Read the next block of the oldest file into memory."""
        segment = self._segments[0]
        count = min(BLOCK_BYTES, self._on_disk, segment.reserved - segment.read)
        data = await beside(self._place.disk, segment.take, count, segment.read)
        segment.read += len(data)
        self._on_disk -= len(data)
        self._head += data
        if segment.read == segment.reserved:
            self._drop_segment()

    def _drop_segment(self) -> None:
        segment = self._segments.popleft()
        self._place.budget.release(segment.reserved)
        self._place.disk.submit(segment.close)


@dataclass(frozen=True)
class SpoolFactory:
    """A maker of spools in one folder that share a budget and a disk thread, each with so many bytes of memory."""

    folder: Path
    memory: int
    budget: DiskBudget
    disk: Executor

    def open(self, what: str, limit: int) -> Spool:
        """A new spool for at most `limit` waiting bytes of `what` (words for error messages)."""
        return Spool(self, what, limit)


def _disk_full(message: str) -> ServiceError:
    return ServiceError(message, code=Code.DISK_FULL)
