"""Passes on what others print without ever waiting for whoever reads it."""

import os
import select

__all__ = ["PassOn"]

KEPT_BYTES = 1 << 18


class PassOn:
    """Bytes for a descriptor that this process shares with others, and whose reader may be slow or gone.

    The descriptor stays in blocking mode, since the others rely on it. It is only written to when it is ready, and
    then at most PIPE_BUF bytes, which a pipe that is ready takes at once. Up to `kept` bytes wait for the next call;
    beyond that the oldest are left out, and a line says how many.
    """

    def __init__(self, descriptor: int, kept: int = KEPT_BYTES) -> None:
        self._descriptor = descriptor
        self._kept = kept
        self._waiting = bytearray()
        self._left_out = 0

    def write(self, data: bytes) -> None:
        """Take `data`, and write of all that waits as much as is taken now."""
        self._waiting += data
        surplus = len(self._waiting) - self._kept
        if surplus > 0:
            del self._waiting[:surplus]
            self._left_out += surplus
        self.flush()

    def flush(self) -> None:
        """Write as much as is taken now; what cannot be written at all is dropped."""
        try:
            while (self._waiting or self._left_out) and self._ready():
                if self._left_out:
                    os.write(self._descriptor, f"\n({self._left_out} bytes of output left out)\n".encode())
                    self._left_out = 0
                else:
                    del self._waiting[: os.write(self._descriptor, self._waiting[: select.PIPE_BUF])]
        except BlockingIOError:
            return  # another process has made the descriptor non-blocking, and it is full
        except OSError:
            self._waiting.clear()

    def _ready(self) -> bool:
        poller = select.poll()
        poller.register(self._descriptor, select.POLLOUT)
        return bool(poller.poll(0))
