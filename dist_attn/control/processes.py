"""The processes of this machine: finding and killing those of a rank group, and their marks, locks and folders.

A rank may be the child of this host's agent, of one that died, or of mpiexec, which may run on another host. Every
process of a group therefore carries a mark in its environment, which children inherit.
"""

import contextlib
import fcntl
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self, final

from dist_attn.errors import ConfigError

GROUP_MARK = "DIST_ATTN_GROUP"
POLL_S = 0.01
HOLDER_BYTES = 500
PREFIX = "dattn-run-"  # short: sockets lie in it, and their paths may have 107 bytes


@dataclass(frozen=True)
class GroupMark:
    """The mark of a process: its engine, its epoch, and its agent; `*` where one launcher serves all agents."""

    engine: str
    epoch: int
    agent: str

    def __str__(self) -> str:
        return f"{self.engine}:{self.epoch}:{self.agent}"

    @classmethod
    def read(cls, environment: bytes) -> Self | None:
        """Read the mark in the environment of a process, as /proc shows it; None where there is none."""
        _, found, rest = (b"\0" + environment).partition(f"\0{GROUP_MARK}=".encode())
        parts = rest.partition(b"\0")[0].decode(errors="replace").split(":", 2)
        return cls(parts[0], int(parts[1]), parts[2]) if found and len(parts) == 3 and parts[1].isdecimal() else None

    def is_of(self, engine: str, agent: str) -> bool:
        """Return whether an agent of an engine answers for the process."""
        return self.engine == engine and self.agent in (agent, "*")


Choice = Callable[[GroupMark], bool]


def group_processes(chosen: Choice, reported: Iterable[int] = ()) -> set[int]:
    """The living processes whose mark is chosen; it is read from the environment that they started with.

    Where processes cannot be looked into (no /proc), the `reported` ids are believed.
    """
    if not Path("/proc/self/environ").exists():
        return {pid for pid in reported if is_alive(pid)}
    marked = set()
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            with contextlib.suppress(OSError):
                mark = GroupMark.read(Path(f"/proc/{entry}/environ").read_bytes())
                if mark is not None and chosen(mark) and is_alive(int(entry)):
                    marked.add(int(entry))
    return marked


def kill_processes(chosen: Choice, reported: Iterable[int], timeout_s: float) -> set[int]:
    """Kill the chosen processes, and those that they start meanwhile; returns what is left after `timeout_s`."""
    believed = list(reported)
    deadline = time.monotonic() + timeout_s
    while left := group_processes(chosen, believed):
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() >= deadline:
            break
        time.sleep(POLL_S)
    return left


def is_alive(pid: int) -> bool:
    """Return whether the process runs; one that has ended and waits for its parent to notice does not."""
    try:
        # The state is the first field after the name, which stands in parentheses and may hold anything.
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        if Path("/proc/self/stat").exists():
            return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


@contextlib.contextmanager
def held(path: Path, holder: str, refusal: str, patience_s: float = 0.0) -> Iterator[None]:
    """Hold a file, in which `holder` then stands, while the block runs; the kernel lets go when this process ends.

    It stays, as a file that others may wait for must not be removed. The lock is one of flock, which holds between
    containers too, and between hosts on NFS; on a file system without locks nothing is held.

    Units: patience_s in seconds, for another process to let go.
    Raises: ConfigError, `refusal` with the other's words for `{}`, where another process has the file; OSError where it
        cannot be opened.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        deadline = time.monotonic() + patience_s
        while not _is_ours(descriptor):
            if time.monotonic() >= deadline:
                words = os.pread(descriptor, HOLDER_BYTES, 0).decode(errors="replace").strip()
                raise ConfigError(refusal.replace("{}", words or "another process"))
            time.sleep(POLL_S)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{holder}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _is_ours(descriptor: int) -> bool:
    """Lock an open file; returns whether no other process has the lock."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # a file system without locks
    return True


@final
class PrivateFolder:
    """A new folder of mode 0700, and a lock on it that the kernel lets go when this process ends.

    The lock tells the folders of living processes from those of killed ones, across containers that share the
    folder `above` too, where a process id says nothing. Without one it lies among the temporary files.

    Raises: OSError where no folder can be made.
    """

    def __init__(self, above: Path | None = None, prefix: str = PREFIX) -> None:
        remove_left_over(above, prefix)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=above))
            try:
                self._lock = _lock(self.path)
            except (BlockingIOError, FileNotFoundError):
                continue  # another process came between and took it for one that was left over
            except OSError:
                self._lock = -1  # a file system without locks: then no other process removes it either
            if self.path.exists():
                return
            if self._lock >= 0:
                os.close(self._lock)

    def remove(self) -> None:
        """Remove the folder with all it holds; a second call does nothing."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def remove_left_over(above: Path | None = None, prefix: str = PREFIX) -> None:
    """Remove this user's folders whose processes have died without removing them."""
    for path in (above or Path(tempfile.gettempdir())).glob(f"{prefix}*"):
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
