"""A terminal of 120 columns in place of stdout or stderr, and what was drawn on it."""

import fcntl
import os
import pty
import struct
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

__all__ = ["Terminal", "terminal_as"]


@dataclass
class Terminal:
    """The side that a person would look at."""

    master: int

    def text(self) -> str:
        """All that was drawn; the program's side must be closed."""
        drawn = b""
        # Linux ends a terminal whose other side is closed with an error in place of an empty read.
        try:
            while data := os.read(self.master, 1 << 16):
                drawn += data
        except OSError:
            pass
        os.close(self.master)
        return drawn.decode()


@contextmanager
def terminal_as(name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    """`sys.<name>` is a terminal until the block ends; it holds what fits into its buffer, some kilobytes."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    with os.fdopen(slave, "w") as terminal, monkeypatch.context() as patched:
        patched.setattr(sys, name, terminal)
        patched.setenv("TERM", "xterm-256color")
        patched.delenv("COLORTERM", raising=False)
        yield Terminal(master)
