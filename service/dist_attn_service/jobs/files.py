"""The files of jobs, the states from which jobs go on, and both together with the catalogue.

Rows are kept as numbers, so that any format can be made of them from any row on.

`input` has the bytes that were sent, `boundaries` the offsets, in little-endian int64, at which rows are to end where
these were sent too; `vectors` is little-endian float32 [rows, dim], and `ranges` little-endian int64 [rows, 4] (start
and stop in tokens, then in bytes); `result` is a completion's JSON. The catalogue tells only of bytes
that were synced before, with every folder on the way to them. JobFiles and RowFile block: their calls belong beside the
event loop.
"""

import os
import shutil
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeVar, final

import numpy as np

from dist_attn.errors import DistAttnError, QuotaError, StorageError, UnknownStateError
from dist_attn.store import StateStore
from dist_attn.store.private import make_private, private_opener, sync_folder
from dist_attn_service.base.errors import Code, NotFound, ServiceError
from dist_attn_service.base.logs import Log
from dist_attn_service.base.tasks import beside
from dist_attn_service.encodings.encoding_run import RowBlock
from dist_attn_service.jobs.catalogue import JobCatalogue, JobPoint

T = TypeVar("T")
RANGE_BYTES = 32


@final
class JobFiles:
    """The files of all jobs. A job's id is always one that the catalogue has given, never a client's word."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def make(self, name: str) -> None:
        """Make the folder of a job."""
        make_private(self._of(name))

    def remove(self, name: str) -> None:
        """Remove all files of a job, if there are any."""
        shutil.rmtree(self._of(name), ignore_errors=True)

    def input(self, name: str) -> Path:
        """The path of the input as it was sent."""
        return self._of(name) / "input"

    def add_input(self, name: str, data: bytes) -> None:
        """Append bytes to the input."""
        with open(self.input(name), "ab", opener=private_opener) as file:
            file.write(data)

    def add_boundaries(self, name: str, data: bytes) -> None:
        """Write the offsets at which rows are to end, all at once."""
        with open(self._boundaries(name), "wb", opener=private_opener) as file:
            file.write(data)

    def read_boundaries(self, name: str) -> bytes:
        """Read the offsets at which rows are to end; empty where none were sent."""
        path = self._boundaries(name)
        return path.read_bytes() if path.exists() else b""

    def sync_input(self, name: str) -> None:
        """Sync the input, and the folders that lead to it, so that they outlast a power cut."""
        for path in filter(Path.exists, (self.input(name), self._boundaries(name))):
            with path.open("rb") as file:
                os.fsync(file.fileno())
        self._sync_names(name)

    def read_input(self, name: str, start: int, count: int) -> bytes:
        """Read bytes [start, start + count) of the input, or as many as there are."""
        with self.input(name).open("rb") as file:
            return os.pread(file.fileno(), count, start)

    def result(self, name: str) -> Path:
        """The path of the file with a completion."""
        return self._of(name) / "result"

    def write_result(self, name: str, data: bytes) -> None:
        """Write a completion to the disk, whole or not at all."""
        self.make(name)
        writing = self.result(name).with_suffix(".writing")
        with open(writing, "wb", opener=private_opener) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        writing.replace(self.result(name))
        self._sync_names(name)

    def rows(self, name: str, dim: int) -> "JobRowFile":
        """The rows of an encoding."""
        return JobRowFile(self._of(name), dim)

    def _boundaries(self, name: str) -> Path:
        return self._of(name) / "boundaries"

    def _sync_names(self, name: str) -> None:
        # All of them, also those that another process has made: it may have died before it synced them.
        for folder in (self._of(name), self._of(name).parent, self._folder):
            sync_folder(folder)

    def _of(self, name: str) -> Path:
        return self._folder / name[-2:] / name


@final
class JobRowFile:
    """Rows in two files. One process writes; others read the rows that the catalogue says are safe.

    A process that was taken for dead may still write for a moment: every row has its place, and equal bits, whoever
    writes it.
    """

    def __init__(self, folder: Path, dim: int) -> None:
        self._vectors_path, self._ranges_path = folder / "vectors", folder / "ranges"
        self._dim = dim
        self._vectors: IO[bytes] | None = None
        self._ranges: IO[bytes] | None = None
        self._lock = threading.Lock()  # progress is saved from one thread while rows come from another
        self._safe = 0
        self.rows = 0

    def begin(self, rows: int) -> int:
        """Open to write after the first `rows` rows, or after fewer if fewer are whole; return how many there are."""
        paths = (self._vectors_path, self._ranges_path)
        self._vectors, self._ranges = (open(path, "r+b", opener=_made) for path in paths)  # noqa: SIM115 - close()
        sync_folder(self._vectors_path.parent)
        files = ((self._vectors, 4 * self._dim), (self._ranges, RANGE_BYTES))
        self.rows = min(rows, *(file.seek(0, os.SEEK_END) // size for file, size in files))
        for file, size in files:
            file.truncate(file.seek(self.rows * size))
        self._safe = self.rows
        return self.rows

    def append(self, block: RowBlock) -> None:
        """Append the next rows."""
        with self._lock:
            assert self._vectors is not None and self._ranges is not None and block.first_row == self.rows
            self._vectors.write(np.ascontiguousarray(block.vectors_ND, dtype="<f4").tobytes())
            self._ranges.write(np.ascontiguousarray(block.ranges_N4, dtype="<i8").tobytes())
            self.rows += len(block)

    def settle(self) -> int:
        """Sync all rows so far, and return how many these are; after `close`, as many as the last time."""
        with self._lock:
            if self._vectors is not None and self._ranges is not None:
                for file in (self._vectors, self._ranges):
                    file.flush()
                    os.fsync(file.fileno())
                self._safe = self.rows
            return self._safe

    def close(self) -> None:
        """Close the files."""
        with self._lock:
            for file in (self._vectors, self._ranges):
                if file is not None:
                    file.close()
            self._vectors = self._ranges = None

    def read(self, first: int, count: int) -> RowBlock:
        """Read rows [first, first + count), which the catalogue says are safe.

        Raises: ServiceError (507) where files have lost some of them.
        """
        with self._vectors_path.open("rb") as vectors, self._ranges_path.open("rb") as ranges:
            numbers = os.pread(vectors.fileno(), count * 4 * self._dim, first * 4 * self._dim)
            spans = os.pread(ranges.fileno(), count * RANGE_BYTES, first * RANGE_BYTES)
        if len(numbers) < count * 4 * self._dim or len(spans) < count * RANGE_BYTES:
            raise ServiceError(
                f"of the rows {first} to {first + count} of this job some are no longer on the disk; a job that runs "
                "makes them again, in place of one that has ended send the input as a new job",
                code=Code.STORAGE_FAILED,
            )
        return RowBlock(
            first,
            np.frombuffer(spans, dtype="<i8").reshape(count, 4),
            np.frombuffer(numbers, dtype="<f4").reshape(count, self._dim),
        )

    def bytes_per_row(self) -> int:
        """The bytes that a row takes on the disk."""
        return RANGE_BYTES + 4 * self._dim


def _made(path: str, flags: int) -> int:
    return private_opener(path, flags | os.O_CREAT)


@final
class JobStates:
    """The states that jobs go on from; one that the store has no room for is not kept, and the job begins again."""

    def __init__(self, store: StateStore, log: Log) -> None:
        self._store = store
        self._log = log

    async def keep(self, caller: str, pieces: AsyncIterator[bytes], seconds: float) -> str | None:
        """Keep a state for so many seconds; return its id, None where there is no room. Memory: a piece.

        Raises: what `pieces` raises.
        """
        snapshots = self._store.snapshots
        try:
            name = (await snapshots.put(caller, pieces)).id
            await snapshots.pin(caller, name, seconds)
        except (QuotaError, StorageError, UnknownStateError) as error:
            self._log.warning("a state of a job was not kept", error=str(error))
            return None
        return name

    async def size(self, caller: str, point: JobPoint) -> int | None:
        """The size in bytes of a state that was kept; None where it is gone or the store cannot be read."""
        try:
            return (await self._store.snapshots.stat(caller, point.snapshot)).size
        except StorageError as error:
            self._log.warning("a state of a job cannot be read", error=str(error))
        except UnknownStateError:
            pass
        return None

    async def pieces(self, caller: str, point: JobPoint) -> AsyncIterator[bytes]:
        """The bytes of a state.

        Raises: NotFound when it cannot be read to its end.
        """
        try:
            async for piece in self._store.snapshots.get(caller, point.snapshot):
                yield piece
        except (UnknownStateError, StorageError) as error:
            raise NotFound(f"the state of this job cannot be read: {error}") from None

    async def forget(self, caller: str, point: JobPoint | None) -> None:
        """Release a state that is no longer needed; it stays where others keep it."""
        if point is None:
            return
        try:
            await self._store.snapshots.unpin(caller, point.snapshot)
        except DistAttnError as error:  # then its time ends
            self._log.debug("a state of a job was not let go of", error=str(error))


@dataclass(frozen=True)
class JobStore:
    """The whole store of jobs: catalogue, files and states."""

    catalogue: JobCatalogue
    files: JobFiles
    states: JobStates

    async def remove(self, name: str) -> None:
        """Forget a job, with its files; states end by themselves."""
        await beside(None, self.files.remove, name)
        await self.catalogue.remove(name)
