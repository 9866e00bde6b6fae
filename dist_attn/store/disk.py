"""The store on a local disk: a catalogue in SQLite (WAL), and a file for every blob, written beside and renamed.

Nothing is half there after a kill or a power cut: files are synced before they have their name, and records are
committed with full syncs after the files that they name. Several processes of one machine may share a folder.
"""

import asyncio
import contextlib
import os
import sqlite3
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar, final

import aiosqlite

from dist_attn.errors import StorageError
from dist_attn.store.blobs import PIECE_BYTES, Blobs
from dist_attn.store.records import BufferedTransaction, Records, RecordView

__all__ = ["DiskBlobs", "DiskRecords"]

T = TypeVar("T")

BUSY_S = 20.0  # another process may hold the catalogue so long
SCHEMA = "CREATE TABLE IF NOT EXISTS records (key TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID"
WRITING = ".writing"


@final
class DiskRecords(Records):
    """One table of one SQLite file; transactions of this process go one by one, those of others wait their turn."""

    def __init__(self, connection: aiosqlite.Connection, file: Path) -> None:
        self._connection = connection
        self._file = file
        self._lock = asyncio.Lock()

    @staticmethod
    async def open(file: Path) -> "DiskRecords":
        """The records in this file, which is made if it is missing.

        Raises: StorageError when it cannot be opened, or is no catalogue.
        """
        with _refusals(f"the catalogue {file} cannot be opened"):
            file.parent.mkdir(parents=True, exist_ok=True)
            connection = await aiosqlite.connect(file, isolation_level=None, timeout=BUSY_S)
            try:
                await connection.execute("PRAGMA journal_mode=WAL")
                await connection.execute("PRAGMA synchronous=FULL")
                await connection.execute(SCHEMA)
            except BaseException:
                await connection.close()
                raise
        return DiskRecords(connection, file)

    async def transact(self, work: Callable[[BufferedTransaction], Awaitable[T]]) -> T:
        """Run the work while nobody else writes."""
        async with self._lock:
            with _refusals(f"the catalogue {self._file} could not be written"):
                try:
                    # Inside: who is cancelled here may have begun it all the same, in the thread of the connection.
                    await self._connection.execute("BEGIN IMMEDIATE")
                    transaction = BufferedTransaction(_DiskView(self._connection))
                    result = await work(transaction)
                    changed = [(key, value) for key, value in transaction.changes.items() if value is not None]
                    gone = [(key,) for key, value in transaction.changes.items() if value is None]
                    await self._connection.executemany("INSERT OR REPLACE INTO records VALUES (?, ?)", changed)
                    await self._connection.executemany("DELETE FROM records WHERE key = ?", gone)
                    await self._connection.execute("COMMIT")
                except BaseException:
                    # A full disk may have rolled back already, or nothing was begun.
                    with contextlib.suppress(sqlite3.Error):
                        await asyncio.shield(self._connection.execute("ROLLBACK"))
                    raise
            return result

    async def close(self) -> None:
        """Close the file."""
        await self._connection.close()


@final
class _DiskView(RecordView):
    def __init__(self, connection: aiosqlite.Connection) -> None:
        self._connection = connection

    async def read(self, keys: list[str]) -> list[bytes | None]:
        found: dict[str, bytes] = {}
        for at in range(0, len(keys), 500):
            part = keys[at : at + 500]
            marks = ",".join("?" * len(part))
            rows = await self._connection.execute_fetchall(
                f"SELECT key, value FROM records WHERE key IN ({marks})", part
            )
            found |= {str(row[0]): bytes(row[1]) for row in rows}
        return [found.get(key) for key in keys]

    async def range(self, prefix: str, after: str, limit: int) -> list[tuple[str, bytes]]:
        rows = await self._connection.execute_fetchall(
            "SELECT key, value FROM records WHERE key >= ? AND key > ? AND key < ? ORDER BY key LIMIT ?",
            (prefix, after, f"{prefix}\U0010ffff", limit),
        )
        return [(str(row[0]), bytes(row[1])) for row in rows]


@final
class DiskBlobs(Blobs):
    """A file for every blob, in folders by the end of its name; no name comes from outside."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def write(self, name: str, pieces: AsyncIterable[bytes]) -> None:
        """Write beside, sync, rename, and sync the folder."""
        path = self._path(name)
        beside = path.with_name(name + WRITING)
        with _refusals("a snapshot could not be written"):
            await asyncio.to_thread(path.parent.mkdir, parents=True, exist_ok=True)
            try:
                with await asyncio.to_thread(beside.open, "xb") as file:
                    async for piece in pieces:
                        await asyncio.to_thread(file.write, piece)
                    await asyncio.to_thread(_settle, file.fileno(), file.flush)
                await asyncio.to_thread(os.replace, beside, path)
                await asyncio.to_thread(_sync_folder, path.parent)
            except BaseException:
                for left in (beside, path):
                    left.unlink(missing_ok=True)
                raise

    async def read(self, name: str) -> AsyncIterator[bytes]:
        """The file; one that is deleted meanwhile is read to its end."""
        what = f"blob {name} cannot be read"
        with _refusals(what), await asyncio.to_thread(self._path(name).open, "rb") as file:
            while piece := await asyncio.to_thread(file.read, PIECE_BYTES):
                yield piece

    async def delete(self, name: str) -> None:
        """Remove the file."""
        with _refusals(f"blob {name} cannot be deleted"):
            for path in (self._path(name), self._path(name).with_name(name + WRITING)):
                await asyncio.to_thread(path.unlink, missing_ok=True)

    async def names(self) -> AsyncIterator[str]:
        """All files, half-written ones too."""
        with _refusals(f"{self._folder} cannot be read"):
            for path in await asyncio.to_thread(lambda: sorted(self._folder.glob("??/*"))):
                yield path.name.removesuffix(WRITING)

    async def close(self) -> None:
        """Nothing is open."""

    def _path(self, name: str) -> Path:
        return self._folder / name[-2:] / name


@contextlib.contextmanager
def _refusals(what: str) -> Iterator[None]:
    """What the system and SQLite say, as a StorageError."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{what}: {error.strerror or error}; make room, or see to the folder's rights") from None
    except sqlite3.Error as error:
        raise StorageError(f"{what}: {error}; make room, or see to the file") from None


def _settle(descriptor: int, flush: Callable[[], None]) -> None:
    flush()
    os.fsync(descriptor)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
