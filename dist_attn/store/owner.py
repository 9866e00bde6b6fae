"""Which process holds something, in words by which others on its machine can see that it has died."""

import os
from functools import cache
from pathlib import Path


def this_process() -> str:
    """This process, unlike any other before, beside or after it; "" where the system does not tell."""
    begun = _begun(os.getpid())
    return f"{_place()}/{os.getpid()}.{begun}" if _place() and begun else ""


def has_died(owner: str) -> bool:
    """Whether the process that was told so by `this_process` is dead for sure; one of another machine never is.

    Cost: one read of /proc.
    """
    place, _, process = owner.rpartition("/")
    pid, _, begun = process.partition(".")
    if not place or place != _place() or not pid.isdecimal():
        return False
    # A number that another process has by now, as the first one of every container has, is not that process.
    return _begun(int(pid)) != begun and not _hidden(int(pid))


@cache
def _place() -> str:
    """This start of this machine, and the numbers that processes have here: those of a container are its own."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}.{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _begun(pid: int) -> str:
    """When a process began, in the clock's ticks; "" where there is none, or it may not be looked at.

    One that has ended and that nobody has waited for yet is there, but did not begin at any time that was told.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    fields = stat.rpartition(")")[2].split()  # behind the name, which may hold anything: from field 3 on
    return "ended" if fields[0] in "ZX" else fields[19]


def _hidden(pid: int) -> bool:
    """Whether there is such a process that this one may not look at."""
    if _begun(pid):
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
