"""Bytes on a local disk: a file for every blob, in private folders. Calls block: they belong beside the event loop.

A name with a slash, such as `JOB/input`, is of a blob that is deleted with all others of `JOB`. Names are drawn by this
program: nothing that a client chose reaches the file system.
"""

import fcntl
import os
import re
import shutil
import tempfile
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import final

from dist_attn.store.private import make_private, sync_folder

MAKE = os.O_RDWR | os.O_CREAT
WRITING = ".writing"  # behind the name of a blob that is there only once it is whole
NAME = re.compile(r"[\w-]+(/[\w-]+)?(\.[a-z]+)?", re.ASCII)
WANTED = ".wanted"  # behind the name of a blob: another writer waits for its lock


@final
class BlobFile(FileIO):
    """An open blob, or any file. One process writes; others may read what it has written."""

    def __init__(self, file: Path | int, flags: int = os.O_RDONLY) -> None:
        super().__init__(file, "r+", opener=lambda path, _: os.open(path, flags, 0o600))

    @staticmethod
    def unnamed(folder: Path) -> "BlobFile":
        """Open a file without a name, which the system removes even when this process is killed."""
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            return BlobFile(os.dup(file.fileno()))

    @property
    def size(self) -> int:
        """The number of bytes."""
        return os.fstat(self.fileno()).st_size

    @property
    def deleted(self) -> bool:
        """Return whether the file has no name any more."""
        return os.fstat(self.fileno()).st_nlink == 0

    def write_at(self, data: bytes, start: int) -> None:
        """Write all of `data` at byte `start`: the system may take it in parts."""
        view = memoryview(data)
        while view:
            count = os.pwrite(self.fileno(), view, start)
            start += count
            view = view[count:]

    def read_at(self, start: int, count: int) -> bytes:
        """Read bytes [start, start + count), or as many as there are."""
        return os.pread(self.fileno(), count, start)

    def sync(self) -> None:
        """Have all bytes on the disk, where they survive a power cut."""
        os.fsync(self.fileno())

    def lock(self) -> bool:
        """Become the one writer until the file is closed, or this process dies; false where there is another one."""
        try:
            fcntl.flock(self.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


@final
class BlobFolder:
    """Blobs in folders by the end of their names."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def path(self, name: str) -> Path:
        """The path of a blob, or of all blobs that are deleted together.

        Raises: ValueError for a name that would lead elsewhere.
        """
        if not NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no name of a blob")
        end = name.partition("/")[0].partition(".")[0][-2:]  # names have no dot, except before WRITING and WANTED
        return self.place / end / name

    def open(self, name: str, flags: int = os.O_RDONLY) -> BlobFile:
        """Open a blob, with MAKE one that may not be there.

        Raises: OSError.
        """
        path = self.path(name)
        if flags & os.O_CREAT:
            make_private(path.parent)
        return BlobFile(path, flags)

    def append(self, name: str, data: bytes) -> None:
        """Append to a blob, which is made if it is not there."""
        with self.open(name, MAKE) as file:
            file.write_at(data, file.size)

    def put(self, name: str, data: bytes) -> None:
        """Write a blob, durably: all of it is there afterwards, or nothing."""
        with self.open(name + WRITING, MAKE) as file:
            file.truncate(0)
            file.write_at(data, 0)
            self.finish(name, file)

    def finish(self, name: str, file: BlobFile) -> None:
        """Give a blob that was written beside, under WRITING, its name; it is durable then."""
        file.sync()
        self.path(name + WRITING).replace(self.path(name))
        self.sync_names(name)

    def read(self, name: str, start: int = 0, count: int | None = None) -> bytes:
        """Read bytes [start, start + count) of a blob, or as many as there are; without `count` to its end."""
        with self.open(name) as file:
            return file.read_at(start, file.size if count is None else count)

    def size(self, name: str) -> int:
        """The bytes of a blob, 0 where it is not there."""
        with suppress(FileNotFoundError):
            return self.path(name).stat().st_size
        return 0

    def sync(self, name: str) -> None:
        """Have a blob on the disk, with its name."""
        with self.open(name) as file:
            file.sync()
        self.sync_names(name)

    def sync_names(self, name: str) -> None:
        """Have the names that lead to a blob on the disk, also of folders that another process has made."""
        for folder in self.path(name).relative_to(self.place).parents:
            sync_folder(self.place / folder)

    def is_locked(self, name: str) -> bool:
        """Return whether a process holds the lock of a blob."""
        with suppress(FileNotFoundError), self.open(name, os.O_RDWR) as file:
            return not file.lock()
        return False

    def delete_all(self, name: str) -> None:
        """Remove the blobs that are deleted together, as far as they are there."""
        shutil.rmtree(self.path(name), ignore_errors=True)

    def delete(self, name: str) -> None:
        """Remove a blob, as far as it is there."""
        path = self.path(name)
        for suffix in (WANTED, WRITING, ""):
            path.with_name(path.name + suffix).unlink(missing_ok=True)

    def folders(self) -> list[str]:
        """The names of the folders that blobs are in."""
        return sorted(path.name for path in self.place.glob("??"))

    def names(self, folder: str = "??") -> list[str]:
        """The names of all blobs, or of those in a folder, in order.

        Also of half-written ones and of those of which only a mark is left.

        Files with other names are not ours, such as those of which NFS keeps what was deleted while it was open.
        """
        names = (path.name.removesuffix(WRITING).removesuffix(WANTED) for path in self.place.glob(f"{folder}/*"))
        return sorted({name for name in names if NAME.fullmatch(name)})
