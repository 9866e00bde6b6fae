"""Finds and kills every process of a rank group, however it was started and whoever its parent is now.

torchrun gives each worker a session of its own, so neither its process group nor its death reaches them. Every process
of a group therefore carries a mark in its environment, which children inherit.
"""

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

__all__ = ["GROUP_MARK", "group_processes", "is_alive", "kill_processes"]

GROUP_MARK = "DIST_ATTN_GROUP"
POLL_S = 0.01


def group_processes(mark: str, reported: Iterable[int] = ()) -> set[int]:
    """The living processes whose mark begins like this; the mark is read from the environment they started with.

    Where processes cannot be looked into (no /proc), the `reported` ids are believed.
    """
    if not Path("/proc/self/environ").exists():
        return {pid for pid in reported if is_alive(pid)}
    wanted = f"\0{GROUP_MARK}={mark}".encode()
    found = set()
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            with contextlib.suppress(OSError):
                if wanted in b"\0" + Path(f"/proc/{entry}/environ").read_bytes() and is_alive(int(entry)):
                    found.add(int(entry))
    return found


def kill_processes(mark: str, reported: Iterable[int], timeout_s: float) -> set[int]:
    """Kill all processes of a group, those that they start meanwhile too; returns what is left after `timeout_s`."""
    believed = list(reported)
    deadline = time.monotonic() + timeout_s
    while left := group_processes(mark, believed):
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() >= deadline:
            break
        time.sleep(POLL_S)
    return left


def is_alive(pid: int) -> bool:
    """Whether the process runs; one that has ended and waits for its parent to notice does not."""
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
