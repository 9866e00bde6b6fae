"""A folder of one process among temporary files, which goes with the process, however that ends."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import final

__all__ = ["PrivateFolder", "remove_left_over"]

PREFIX = "dattn-run-"  # short: sockets lie in it, and their paths may have 107 bytes


@final
class PrivateFolder:
    """A new folder of mode 0700, and a lock on it that the kernel lets go when this process ends.

    The lock tells the folders of living processes from those of killed ones, across containers that share the
    temporary folder too, where a process id says nothing.

    Raises: OSError where no temporary files can be made.
    """

    def __init__(self) -> None:
        remove_left_over()
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
            try:
                self._lock = _lock(self.path)
            except (BlockingIOError, FileNotFoundError):
                continue  # another process came between and took it for one that was left over
            except OSError:
                self._lock = -1  # a file system without locks: then nobody else removes it either
            if self.path.exists():
                return
            if self._lock >= 0:
                os.close(self._lock)

    def remove(self) -> None:
        """Remove it with all it holds; once more does nothing."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def remove_left_over() -> None:
    """Remove this user's folders whose processes have died without removing them."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if path.lstat().st_uid == os.getuid():
                lock = _lock(path)
                shutil.rmtree(path, ignore_errors=True)
                os.close(lock)


def _lock(folder: Path) -> int:
    """A descriptor that holds the lock. Raises: OSError, BlockingIOError where another process has it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
