"""The processes of this machine: finding and killing those of a rank group, and their marks, locks and folders.

A rank may be the child of this host's agent, of one that died, or of mpiexec. Every process of a group therefore
carries a mark in its environment, which children inherit.
"""

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import final

from dist_attn.errors import ConfigError

GROUP_MARK = "DIST_ATTN_GROUP"
POLL_S = 0.01
HOLDER_BYTES = 500
PREFIX = "dattn-run-"  # short: sockets lie in it, and their paths may have 107 bytes


def group_mark(engine: str, agent: str, epoch: int | None = None) -> str:
    """The mark of the ranks that an agent has started for a controller; without an epoch how all of these begin."""
    return f"{engine}:{agent}:{'' if epoch is None else epoch}"


def group_processes(mark: str) -> set[int]:
    """The living processes that started with this mark, or with one that begins so if it ends with a colon.

    None where processes cannot be looked into (no /proc).
    """
    marked, wanted = set(), f"\0{GROUP_MARK}={mark}{'' if mark.endswith(':') else chr(0)}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        # A process that has ended and waits for its parent to notice has no environment any more.
        with contextlib.suppress(OSError):
            if wanted in b"\0" + (folder / "environ").read_bytes() and folder.name != str(os.getpid()):
                marked.add(int(folder.name))
    return marked


def kill_processes(mark: str, timeout_s: float) -> set[int]:
    """Kill the processes with this mark, and those that they start meanwhile; returns those left after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while left := group_processes(mark):
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() >= deadline:
            break
        time.sleep(POLL_S)
    return left


def end_process(process: subprocess.Popen[bytes], deadline_s: float) -> int:
    """Let a child end in order, or after the deadline at once; returns its exit code."""
    process.terminate()
    try:
        return process.wait(deadline_s)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


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
