"""A proxy between a client and a service that cuts connections after so many bytes, as networks do."""

import array
import contextlib
import fcntl
import socket
import struct
import termios
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tests.support.waiting import PATIENCE_SECONDS

__all__ = ["Cut", "CuttingProxy", "cutting_proxy"]


@dataclass(frozen=True)
class Cut:
    """Where a connection is reset: after so many bytes of the request, or of the answer."""

    sent: int | None = None
    answered: int | None = None


@dataclass
class CuttingProxy:
    """Where it listens; the next connections are cut as `cuts` say, in order, later ones are left alone."""

    port: int
    cuts: deque[Cut] = field(default_factory=deque)
    connections: int = 0
    made: int = 0  # cuts

    @property
    def url(self) -> str:
        """http://host:port"""
        return f"http://127.0.0.1:{self.port}"


@contextmanager
def cutting_proxy(port: int) -> Iterator[CuttingProxy]:
    """A proxy before the service on a port of this machine."""
    listener = socket.create_server(("127.0.0.1", 0))
    proxy = CuttingProxy(listener.getsockname()[1])
    threads: list[threading.Thread] = []
    sockets: list[socket.socket] = []

    def accept() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", port))
            proxy.connections += 1
            cut = proxy.cuts.popleft() if proxy.cuts else Cut()
            sockets.extend((client, server))
            for source, sink, limit in ((client, server, cut.sent), (server, client, cut.answered)):
                threads.append(threading.Thread(target=_pass_on, args=(proxy, source, sink, limit, (client, server))))
                threads[-1].start()

    thread = threading.Thread(target=accept)
    thread.start()
    try:
        yield proxy
    finally:
        # A blocked accept is not ended by closing its socket, a connection ends it.
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(60)
        for one in sockets:
            _end(one)
        for thread in threads:
            thread.join(60)


def _pass_on(
    proxy: CuttingProxy,
    source: socket.socket,
    sink: socket.socket,
    limit: int | None,
    both: tuple[socket.socket, socket.socket],
) -> None:
    passed = 0
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16 if limit is None else max(1, min(1 << 16, limit - passed))):
            if limit is not None and passed + len(data) >= limit:
                sink.sendall(data[: limit - passed])
                _arrived(sink)
                proxy.made += 1
                for one in both:
                    _end(one)
                return
            sink.sendall(data)
            passed += len(data)
        sink.shutdown(socket.SHUT_WR)


def _arrived(sink: socket.socket) -> None:
    """Wait until the other side's system has what was sent: a reset discards the rest, more of it on a busy machine."""
    waiting = array.array("i", [0])
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        fcntl.ioctl(sink, termios.TIOCOUTQ, waiting)
        if not waiting[0]:
            return
        time.sleep(0.001)


def _end(one: socket.socket) -> None:
    """A reset, whatever waits in either direction."""
    with contextlib.suppress(OSError):
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        one.shutdown(socket.SHUT_RDWR)
    with contextlib.suppress(OSError):
        one.close()
