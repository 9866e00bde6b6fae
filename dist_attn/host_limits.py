"""Cores and memory that a process may use on its host, by its affinity and control groups, and its time slices."""

import contextlib
import ctypes
import gc
import importlib
import math
import os
import platform
import struct
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

__all__ = [
    "MemoryLimit",
    "affine_cores",
    "ask_for_short_slices",
    "available_memory",
    "compute_environment",
    "core_quota",
    "given_threads",
    "load",
    "memory_limit",
    "oom_kills",
    "usable_cores",
]

ROOT = Path("/")  # of the files that the kernel shows
NO_LIMIT = 1 << 62  # bytes; version 1 says "none" by the largest number of pages
SLICE_NS = 100_000  # the shortest that Linux gives
# struct sched_attr: size, policy, flags, nice, priority, runtime (of this policy the slice), deadline, period
SCHED_ATTR = struct.Struct("IIQiIQQQ")
SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}  # the number of the system call
_FOLDER = Path("sys/fs/cgroup")


class MemoryLimit(NamedTuple):
    """A limit of memory, and the bytes below it that are free or can be freed."""

    limit_bytes: int
    free_bytes: int


def compute_environment(ranks: int, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables for OpenMP, before it loads, in each of `ranks` processes that compute on this host at one time.

    What `environ` says already stays. By default a thread that waits spins for milliseconds; where other work needs its
    core, the threads that it waits for are held up, and all is tens of times slower. Passive waiting, a word of the
    standard which the libraries of GNU, LLVM and Intel heed, is sleep.
    """
    words = {"OMP_NUM_THREADS": str(max(1, usable_cores() // ranks)), "OMP_WAIT_POLICY": "passive"}
    return {name: environ.get(name) or word for name, word in words.items()}


def ask_for_short_slices() -> None:
    """Ask Linux for time slices of 0.1 ms for this process and all threads and processes that it starts from now on.

    Threads that compute a step together wait for each other many times in it. Beside other load, one whose core is
    taken holds up all of them until its next slice, milliseconds later by default. How much of the processor each
    process gets stays as it is. Before Linux 6.12 and on other processors than x86-64 and arm64 nothing happens, nor to
    a process with a policy of its own, nor where a sandbox refuses the call.
    """
    number = SCHED_SETATTR.get(platform.machine())
    if sys.platform != "linux" or number is None or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    attributes = SCHED_ATTR.pack(SCHED_ATTR.size, os.SCHED_OTHER, 0, nice, 0, SLICE_NS, 0, 0)
    ctypes.CDLL(None).syscall(number, 0, attributes, 0)


def load(module: str) -> None:
    """Import a module that brings large libraries, without looking for garbage meanwhile: all of it stays."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        importlib.import_module(module)
    finally:
        if enabled:
            gc.enable()


def given_threads(environ: Mapping[str, str]) -> int | None:
    """The number of threads with which OpenMP is told to compute, of a list the first; None where it is told none."""
    first = environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(first) if first.isdecimal() and int(first) > 0 else None


def usable_cores() -> int:
    """The number of cores that this process may use, by affinity and quota; a part of a core counts as one."""
    cores = affine_cores()
    quota = core_quota()
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))


def affine_cores() -> int:
    """The number of cores on which this process may run."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def core_quota() -> float | None:
    """The cores' worth of time that the control groups of this process may use; None without a limit."""
    quotas = []
    for folder in _groups(""):
        with contextlib.suppress(OSError, ValueError):
            quota, period = (folder / "cpu.max").read_text().split()
            quotas.append(int(quota) / int(period))
    for folder in _groups("cpu"):
        with contextlib.suppress(OSError, ValueError):
            quota_us, period_us = (int((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
            if quota_us > 0:
                quotas.append(quota_us / period_us)
    return min(quotas, default=None)


def memory_limit() -> MemoryLimit | None:
    """The limit on this process's control groups that is reached first; None without any."""
    limits = [
        *(_memory_limit(folder, "memory.max", "memory.current", "inactive_file") for folder in _groups("")),
        *(
            _memory_limit(folder, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            for folder in _groups("memory")
        ),
    ]
    return min((limit for limit in limits if limit is not None), key=lambda limit: limit.free_bytes, default=None)


def available_memory() -> tuple[int | None, int | None]:
    """The bytes in all and the bytes available, within the limits; None where the system does not say."""
    total = available = None
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = (ROOT / "proc/meminfo").read_text().splitlines()
        fields = {line.split(":")[0]: int(line.split()[1]) << 10 for line in lines if ":" in line}
        total, available = fields.get("MemTotal"), fields.get("MemAvailable")
    if total is None:
        with contextlib.suppress(OSError, ValueError):
            total = available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if limit := memory_limit():
        total = limit.limit_bytes if total is None else min(total, limit.limit_bytes)
        available = limit.free_bytes if available is None else min(available, limit.free_bytes)
    return total, available


def oom_kills() -> int | None:
    """The number of processes of this one's control group that were killed for want of memory; None if not counted."""
    for version, name in (("", "memory.events"), ("memory", "memory.oom_control")):
        for folder in _groups(version):
            with contextlib.suppress(OSError, ValueError, KeyError):
                return int(_fields(folder / name)["oom_kill"])
    return None


def _memory_limit(folder: Path, limit_name: str, used_name: str, given_up_name: str) -> MemoryLimit | None:
    with contextlib.suppress(OSError, ValueError):  # "max" among them
        limit, used = (int((folder / name).read_text()) for name in (limit_name, used_name))
        # Pages of files that nobody used of late count as used, but are given up first.
        given_up = int(_fields(folder / "memory.stat").get(given_up_name, 0))
        return MemoryLimit(limit, max(0, limit - used + given_up)) if limit < NO_LIMIT else None
    return None


def _groups(controller: str) -> Iterator[Path]:
    """The folders of this process's group and of those above it, as far as they are seen from here.

    `controller` is the one of version 1; empty: version 2, which has one tree for all.
    A container may see its own group alone, at the root, while its path is told from the host's.
    """
    with contextlib.suppress(OSError, ValueError):
        for line in (ROOT / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controller not in controllers.split(","):
                continue
            top = ROOT / _FOLDER / controller
            if not controller and (top / "unified").is_dir():
                top = top / "unified"  # beside version 1
            own = top if ".." in path else top / path.lstrip("/")  # a group beside the ones that are seen
            yield from (folder for folder in (own, *own.parents) if folder.is_relative_to(top) and folder.is_dir())


def _fields(path: Path) -> dict[str, str]:
    return dict(line.split() for line in path.read_text().splitlines())
