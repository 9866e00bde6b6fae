"""The time slices of a thread, as Linux tells them."""

import ctypes
import os
import platform
import re
import sys

import pytest

from dist_attn.host_limits import SCHED_ATTR, SCHED_SETATTR

_ASKABLE = sys.platform == "linux" and platform.machine() == "x86_64"
_TOLD = tuple(map(int, re.findall(r"\d+", platform.release())[:2])) >= (6, 12)
needs_slices = pytest.mark.skipif(not (_ASKABLE and _TOLD), reason="needs Linux from 6.12 on, on x86_64")


def slice_of(thread: int) -> int:
    """The nanoseconds of a thread's slices; 0 is this thread."""
    found = ctypes.create_string_buffer(SCHED_ATTR.size)
    if ctypes.CDLL(None, use_errno=True).syscall(SCHED_SETATTR["x86_64"] + 1, thread, found, SCHED_ATTR.size, 0):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(SCHED_ATTR.unpack(found.raw)[5])
