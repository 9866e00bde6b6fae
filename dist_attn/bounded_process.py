"""Processes with bounds of memory, time and output, for work on what strangers send."""

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

__all__ = ["bound_here", "bounded_command", "limit", "run_bounded"]


def limit(what: int, value: int) -> None:
    """Set one of `resource`'s limits of this process, as far as the system lets it."""
    with suppress(ValueError, OSError):  # of a system that does not know it, or has granted less
        resource.setrlimit(what, (value, resource.getrlimit(what)[1]))


def bound_here(memory_bytes: int, seconds: float | None = None) -> None:
    """Bound this process: its memory and, where they are given, the processor's seconds.

    The system then ends it, also within a library, even if whoever started it is gone.
    """
    limit(resource.RLIMIT_AS, memory_bytes)
    limit(resource.RLIMIT_CORE, 0)
    with suppress(OSError):  # where memory is short, this process goes first and the service stays
        Path("/proc/self/oom_score_adj").write_text("1000")
    if seconds is not None:
        signal.setitimer(signal.ITIMER_PROF, seconds)


def bounded_command(module: str, arguments: Sequence[str] = ()) -> tuple[list[str], dict[str, Any]]:
    """The command that runs a module which calls `bound_here`, and what Popen is given besides."""
    few_threads = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}  # each takes of the bounded memory
    # A session of its own: a Ctrl-C in the terminal is for the service alone.
    return [sys.executable, "-P", "-m", module, *arguments], {"env": few_threads, "start_new_session": True}


def run_bounded(
    module: str, arguments: Sequence[str] = (), *, timeout_s: float, **streams: Any
) -> "subprocess.CompletedProcess[bytes]":
    """Run a `bounded_command` to its end, with `streams` as of subprocess.run.

    Units: timeout_s in seconds, of the clock.
    Raises: OSError, subprocess.TimeoutExpired.
    """
    command, besides = bounded_command(module, arguments)
    return subprocess.run(command, timeout=timeout_s, **besides, **streams)
