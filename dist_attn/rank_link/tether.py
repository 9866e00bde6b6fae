"""The tie of a process to its parent, so that none is left behind however the other one dies.

    python -m dist_attn.rank_link.tether PARENT PROGRAM [ARGUMENT …]

runs the program as this process, tied to PARENT: a launcher such as mpiexec cannot be asked to do it itself.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def die_with_parent() -> None:
    """Let the kernel kill this process when the thread that started it ends (Linux; elsewhere nothing happens).

    The setting survives exec, and a killed parent cannot forget it.
    """
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """Make descendants whose parents die children of this process, which then can wait for them (Linux)."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def parent_is_gone(parent: int) -> bool:
    """Return whether `parent` is no longer the parent of this process; 0 stands for any."""
    return parent != 0 and os.getppid() != parent


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def main(arguments: list[str]) -> None:
    """Tie this process to its parent and become the program."""
    die_with_parent()
    if parent_is_gone(int(arguments[0])):
        # The parent died before the kernel knew of the tie.
        sys.exit(1)
    try:
        os.execvp(arguments[1], arguments[1:])
    except OSError as error:
        print(f"{arguments[1]} cannot be started: {error.strerror}", file=sys.stderr)
        sys.exit(127)


if __name__ == "__main__":
    main(sys.argv[1:])
