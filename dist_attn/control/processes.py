"""Finds and kills every process of a rank group, however it was started and whoever its parent is now.

A rank may be the child of this host's agent, of one that died, or of mpiexec, which may run on another host. Every
process of a group therefore carries a mark in its environment, which children inherit.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

__all__ = ["GROUP_MARK", "GroupMark", "group_processes", "is_alive", "kill_processes"]

GROUP_MARK = "DIST_ATTN_GROUP"
POLL_S = 0.01


@dataclass(frozen=True)
class GroupMark:
    """Whose a process is: of which engine, which epoch, and which of its agents; `*` where one launcher serves all."""

    engine: str
    epoch: int
    agent: str

    def __str__(self) -> str:
        return f"{self.engine}:{self.epoch}:{self.agent}"

    @classmethod
    def read(cls, environment: bytes) -> Self | None:
        """The mark in the environment of a process, as /proc shows it; None where there is none."""
        _, found, rest = (b"\0" + environment).partition(f"\0{GROUP_MARK}=".encode())
        parts = rest.partition(b"\0")[0].decode(errors="replace").split(":", 2)
        return cls(parts[0], int(parts[1]), parts[2]) if found and len(parts) == 3 and parts[1].isdecimal() else None

    def is_of(self, engine: str, agent: str) -> bool:
        """Whether an agent of an engine answers for the process."""
        return self.engine == engine and self.agent in (agent, "*")


Choice = Callable[[GroupMark], bool]


def group_processes(chosen: Choice, reported: Iterable[int] = ()) -> set[int]:
    """The living processes whose mark is chosen; it is read from the environment that they started with.

    Where processes cannot be looked into (no /proc), the `reported` ids are believed.
    """
    if not Path("/proc/self/environ").exists():
        return {pid for pid in reported if is_alive(pid)}
    found = set()
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            with contextlib.suppress(OSError):
                mark = GroupMark.read(Path(f"/proc/{entry}/environ").read_bytes())
                if mark is not None and chosen(mark) and is_alive(int(entry)):
                    found.add(int(entry))
    return found


def kill_processes(chosen: Choice, reported: Iterable[int], timeout_s: float) -> set[int]:
    """Kill the chosen processes, those that they start meanwhile too; returns what is left after `timeout_s`."""
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
