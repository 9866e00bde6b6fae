"""The store on a local disk: a catalogue in SQLite (WAL), and a file for every blob, written beside and renamed.

Nothing is half there after a kill or a power cut: files are synced before they have their name, and records are
committed with full syncs after the files that they name. Several processes of one machine may share a folder.
"""

import asyncio
import contextlib
import os
import secrets
import sqlite3
import time
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar, final

import aiosqlite

from dist_attn.errors import CatalogueDamagedError, StateDamagedError, StorageError
from dist_attn.store.files import MAKE, WRITING, BlobFile, BlobFolder
from dist_attn.store.ports import PIECE_BYTES, Blobs, BufferedTransaction, Records, RecordView
from dist_attn.store.private import make_private, private_opener, sync_folder

T = TypeVar("T")

CATALOGUE, SNAPSHOTS = "catalogue.sqlite", "snapshots"  # in the folder of a store
BUSY_S = 20.0  # another process may hold the catalogue so long
SCHEMA = "CREATE TABLE IF NOT EXISTS records (key TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID"
PLACE = "place"  # the file with the name of a folder of blobs, beside it
RESERVE = "-reserve"  # behind the name of a catalogue
RESERVE_BYTES = 1 << 20  # of the disk, for the log of changes that make room when nothing else is left


def has_records(catalogue: Path) -> bool:
    """Return whether the file is there and not empty; any other becomes a new catalogue when it is opened.

    Raises: OSError.
    """
    return catalogue.is_file() and catalogue.stat().st_size > 0


@final
class DiskRecords(Records):
    """One table of one SQLite file; transactions of this process go one by one, those of others wait their turn."""

    def __init__(self, connection: aiosqlite.Connection, file: Path) -> None:
        self._connection = connection
        self._file = file
        self._lock = asyncio.Lock()
        self._reserve = _reserve_of(file)
        self._has_reserve = _make_reserve(self._reserve)

    @staticmethod
    async def open(file: Path) -> "DiskRecords":
        """Open the records in this file, which is made if it is missing; on a full disk in the room of the reserve.

        Raises: StorageError when it cannot be opened; CatalogueDamagedError when it is no catalogue, or a damaged one.
        """
        with _refusals(f"the catalogue {file} cannot be opened", file):
            make_private(file.parent)
            os.close(private_opener(str(file), os.O_RDWR | os.O_CREAT))  # SQLite gives its log the same rights
            try:
                connection = await _connect_in_turn(file)
            except sqlite3.OperationalError as error:
                # The second: the index of the log, which lies in a file too, cannot be made.
                if error.sqlite_errorcode & 0xFF not in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):
                    raise
                _reserve_of(file).unlink(missing_ok=True)
                connection = await _connect(file)
        return DiskRecords(connection, file)

    async def transact(self, work: Callable[[BufferedTransaction], Awaitable[T]]) -> T:
        """Run the work while no other process writes.

        On a full disk a change that makes the catalogue smaller is made all the same, in the room of the reserve.
        """
        async with self._lock:
            with _refusals(f"the catalogue {self._file} could not be written", self._file):
                changes: dict[str, bytes | None] = {}
                try:
                    result = await self._attempt(work, changes)
                except sqlite3.OperationalError as error:
                    if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_FULL or not await self._shrinks(changes):
                        raise
                    await self._use_reserve()
                    result = await self._attempt(work, changes)
                if changes and not self._has_reserve:
                    self._has_reserve = await asyncio.to_thread(_make_reserve, self._reserve)
            return result

    async def _attempt(
        self, work: Callable[[BufferedTransaction], Awaitable[T]], changes: dict[str, bytes | None]
    ) -> T:
        """Run the work once; `changes` is filled with what was to be changed, also where it fails."""
        try:
            # Inside: a task cancelled here may have begun it all the same, in the thread of the connection.
            await self._connection.execute("BEGIN IMMEDIATE")
            transaction = BufferedTransaction(_DiskView(self._connection))
            result = await work(transaction)
            changes |= transaction.changes
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

    async def _shrinks(self, changes: dict[str, bytes | None]) -> bool:
        """Return whether the records take less room after these changes."""
        before = await _DiskView(self._connection).read(list(changes))
        grown = 0
        for (key, new), old in zip(changes.items(), before, strict=True):
            grown += 0 if new is None else len(key) + len(new)
            grown -= 0 if old is None else len(key) + len(old)
        return grown < 0

    async def _use_reserve(self) -> None:
        """Make room for the log, and let what is in it be overwritten."""
        self._has_reserve = False
        await asyncio.to_thread(self._reserve.unlink, missing_ok=True)
        with contextlib.suppress(sqlite3.Error):
            await self._connection.execute_fetchall("PRAGMA wal_checkpoint(PASSIVE)")

    async def close(self) -> None:
        """Close the file."""
        await self._connection.close()


async def _connect_in_turn(file: Path) -> aiosqlite.Connection:
    """Connect as `_connect` does, again while another process makes the same file: SQLite does not wait there."""
    deadline = time.monotonic() + BUSY_S
    while True:
        try:
            return await _connect(file)
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
        await asyncio.sleep(0.01)


async def _connect(file: Path) -> aiosqlite.Connection:
    """Raises: sqlite3.Error, CatalogueDamagedError."""
    connection = await aiosqlite.connect(file, isolation_level=None, timeout=BUSY_S)
    try:
        await connection.execute("PRAGMA journal_mode=WAL")
        await connection.execute("PRAGMA synchronous=FULL")
        await connection.execute(SCHEMA)
        ((found,),) = await connection.execute_fetchall("PRAGMA quick_check(1)")
        if found != "ok":
            raise _damaged(file, str(found))
    except BaseException:
        await connection.close()
        raise
    return connection


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
    """A file for every blob."""

    def __init__(self, folder: Path) -> None:
        self._folder = BlobFolder(folder)

    async def write(self, name: str, pieces: AsyncIterable[bytes]) -> None:
        """Write beside, sync, rename, and sync the names."""
        with _refusals("a snapshot could not be written"):
            try:
                with await self._opened(name + WRITING, MAKE | os.O_EXCL) as file:
                    at = 0
                    async for piece in pieces:
                        await asyncio.to_thread(file.write_at, piece, at)
                        at += len(piece)
                    await asyncio.to_thread(self._folder.finish, name, file)
            except BaseException:
                self._folder.delete(name)
                raise

    async def read(self, name: str) -> AsyncIterator[bytes]:
        """Read the file; one that is deleted meanwhile is read to its end."""
        with _refusals(f"blob {name} cannot be read"):
            try:
                file = await self._opened(name)
            except FileNotFoundError:
                raise StateDamagedError(f"blob {name} is not there: {self._folder.path(name)} was deleted") from None
            with file:
                at = 0
                while piece := await asyncio.to_thread(file.read_at, at, PIECE_BYTES):
                    yield piece
                    at += len(piece)

    async def _opened(self, name: str, flags: int = os.O_RDONLY) -> BlobFile:
        """Open a file in a thread; for a task that is cancelled meanwhile it is closed again."""
        opening = asyncio.ensure_future(asyncio.to_thread(self._folder.open, name, flags))
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            await asyncio.wait({opening})
            if opening.exception() is None:
                opening.result().close()
            raise

    async def has(self, name: str) -> bool:
        """Return whether the file is there."""
        with _refusals(f"blob {name} cannot be looked for"):
            return await asyncio.to_thread(self._folder.path(name).is_file)

    async def delete(self, name: str) -> None:
        """Remove the file."""
        with _refusals(f"blob {name} cannot be deleted"):
            await asyncio.to_thread(self._folder.delete, name)

    async def names(self) -> AsyncIterator[str]:
        """Iterate over the names of all files, half-written ones too."""
        with _refusals(f"{self._folder.place} cannot be read"):
            for folder in await asyncio.to_thread(self._folder.folders):
                for name in await asyncio.to_thread(self._folder.names, folder):
                    yield name

    async def place(self) -> str:
        """Read the name from a file beside the folder."""
        with _refusals(f"{self._folder.place.parent} cannot be used"):
            return await asyncio.to_thread(_name_in, self._folder.place.parent / PLACE)

    async def close(self) -> None:
        """Close nothing: no file stays open."""


def _damaged(file: Path, why: str) -> CatalogueDamagedError:
    return CatalogueDamagedError(
        f"the catalogue {file} is damaged ({' '.join(why.split())}); put a backup in its place, or, where it is that "
        f"of stored states, run `dist-attn state repair {file.parent}`"
    )


@contextlib.contextmanager
def _refusals(what: str, catalogue: Path | None = None) -> Iterator[None]:
    """Turn errors of the system and of SQLite into a StorageError."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{what}: {error.strerror or error}; make room, or see to the folder's rights") from None
    except sqlite3.Error as error:
        # The low byte is the kind of an extended code.
        if catalogue and (getattr(error, "sqlite_errorcode", 0) & 0xFF) in (
            sqlite3.SQLITE_CORRUPT,
            sqlite3.SQLITE_NOTADB,
        ):
            raise _damaged(catalogue, str(error)) from None
        raise StorageError(f"{what}: {error}; make room, or see to the file") from None


def _reserve_of(catalogue: Path) -> Path:
    return catalogue.with_name(f"{catalogue.name}{RESERVE}")


def _make_reserve(file: Path) -> bool:
    """Take room of the disk for later; false where there is none. A reserve that is there already stays."""
    try:
        with open(file, "xb", opener=private_opener) as reserve:
            reserve.write(os.urandom(RESERVE_BYTES))  # zeros take no room where the file system compresses
    except FileExistsError:  # perhaps another process has just made it
        return True
    except OSError:
        file.unlink(missing_ok=True)
        return False
    return True


def _name_in(file: Path) -> str:
    """Read the name of a place, which is drawn when there is none yet; of two processes that do so one is faster."""
    if not file.exists():
        make_private(file.parent)
        name = secrets.token_hex(16)
        beside = file.with_name(f"{file.name}.{name}{WRITING}")
        try:
            with open(beside, "x", opener=private_opener) as drawn:
                drawn.write(name)
                drawn.flush()
                os.fsync(drawn.fileno())
            with contextlib.suppress(FileExistsError):
                os.link(beside, file)
        finally:
            beside.unlink(missing_ok=True)
        sync_folder(file.parent)
    return file.read_text()
