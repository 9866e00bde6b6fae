"""The files of jobs, the states from which jobs go on, and both together with the catalogue.

Of the blobs `JOB/…`, `input` has the bytes that were sent, `boundaries` the offsets, in little-endian int64, at which
rows are to end where these were sent too, `sections` the JSON of a document's pages or headings, and `result` is a
completion's JSON. Rows are kept as numbers, so that any format can be made of them from any row on: `vectors` is
little-endian float32 [rows, dim], and `ranges` little-endian int64 [rows, 4] (start and stop in tokens, then in
bytes). The catalogue tells only of bytes that were synced before, with every folder on the way to them.
"""

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import final

import numpy as np

from dist_attn.errors import DistAttnError, QuotaError, StorageError, UnknownStateError
from dist_attn.store import StateStore
from dist_attn.store.files import MAKE, BlobFile, BlobFolder
from dist_attn.store.private import sync_folder
from dist_attn.wire.messages import BeginState, Checkpoint
from dist_attn_service.base.errors import Code, ServiceError
from dist_attn_service.base.logs import Log
from dist_attn_service.base.tasks import beside
from dist_attn_service.encodings.encoding_run import RowBlock
from dist_attn_service.engine.run import begin_from, record_state
from dist_attn_service.jobs.catalogue import JobCatalogue, JobPoint

RANGE_BYTES = 32


@final
class JobRowFile:
    """Rows in two files of a job's folder. One process writes; others read the rows that the catalogue says are safe.

    A process that was taken for dead may still write for a moment: every row has its place, and equal bits, whoever
    writes it.
    """

    def __init__(self, folder: Path, dim: int) -> None:
        self._folder = folder
        self._dim = dim
        self._sizes = {"vectors": 4 * dim, "ranges": RANGE_BYTES}
        self._files: list[BlobFile] = []
        self._lock = threading.Lock()  # progress is saved from one thread while rows come from another
        self._safe = 0
        self.rows = 0

    def begin(self, rows: int) -> int:
        """Open to write after the first `rows` rows, or after fewer if fewer are whole; return how many there are."""
        self._files = [BlobFile(self._folder / name, MAKE) for name in self._sizes]
        sync_folder(self._folder)
        sizes = self._sizes.values()
        self.rows = min(rows, *(file.size // size for file, size in zip(self._files, sizes, strict=True)))
        for file, size in zip(self._files, sizes, strict=True):
            file.truncate(self.rows * size)
        self._safe = self.rows
        return self.rows

    def append(self, block: RowBlock) -> None:
        """Append the next rows."""
        parts = (np.ascontiguousarray(block.vectors_ND, dtype="<f4"), np.ascontiguousarray(block.ranges_N4, "<i8"))
        with self._lock:
            assert self._files and block.first_row == self.rows
            for file, part, size in zip(self._files, parts, self._sizes.values(), strict=True):
                file.write_at(part.tobytes(), self.rows * size)
            self.rows += len(block)

    def settle(self) -> int:
        """Sync all rows so far, and return how many these are; after `close`, as many as the last time."""
        with self._lock:
            for file in self._files:
                file.sync()
            if self._files:
                self._safe = self.rows
            return self._safe

    def close(self) -> None:
        """Close the files."""
        with self._lock:
            for file in self._files:
                file.close()
            self._files = []

    def read(self, first: int, count: int) -> RowBlock:
        """Read rows [first, first + count), which the catalogue says are safe.

        Raises: ServiceError (507) where files have lost some of them.
        """
        parts: list[bytes] = []
        for name, size in self._sizes.items():
            with BlobFile(self._folder / name) as file:
                parts.append(file.read_at(first * size, count * size))
        if any(len(part) < count * size for part, size in zip(parts, self._sizes.values(), strict=True)):
            raise ServiceError(
                f"of the rows {first} to {first + count} of this job some are no longer on the disk; a job that runs "
                "makes them again, in place of one that has ended send the input as a new job",
                code=Code.STORAGE_FAILED,
            )
        vectors_ND = np.frombuffer(parts[0], dtype="<f4").reshape(count, self._dim)
        return RowBlock(first, np.frombuffer(parts[1], dtype="<i8").reshape(count, 4), vectors_ND)

    def bytes_per_row(self) -> int:
        """The bytes that a row takes on the disk."""
        return sum(self._sizes.values())


@final
class JobStates:
    """The states that jobs go on from; one that the store has no room for is not kept, and the job begins again."""

    def __init__(self, store: StateStore, log: Log) -> None:
        self._store = store
        self._log = log

    async def keep(self, caller: str, state: Checkpoint, seconds: float) -> str | None:
        """Keep a state that the engine has stored for so many seconds; return its id, None where there is no room."""
        try:
            name = await record_state(self._store, caller, state)
            await self._store.snapshots.pin(caller, name, seconds)
        except (QuotaError, StorageError, UnknownStateError) as error:
            self._log.warning("a state of a job was not kept", error=str(error))
            return None
        return name

    async def discard(self, state: Checkpoint) -> None:
        """Delete a state that the engine has stored and no job goes on from."""
        await self._store.snapshots.discard(state.blob)

    async def begin(self, caller: str, point: JobPoint) -> BeginState | None:
        """The state to go on from; None where it is gone or the store cannot be read."""
        try:
            return await begin_from(self._store, caller, point.run.tokens, point.snapshot)
        except StorageError as error:
            self._log.warning("a state of a job cannot be read", error=str(error))
        except UnknownStateError:
            pass
        return None

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
    files: BlobFolder
    states: JobStates

    async def remove(self, name: str) -> None:
        """Forget a job, with its files; states end by themselves."""
        await beside(None, self.files.delete_all, name)
        await self.catalogue.remove(name)
