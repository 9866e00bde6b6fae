"""A proxy between a client and a service that breaks connections off in the middle, or loses them without a word."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

__all__ = ["BreakingProxy", "breaking_proxy"]

PAUSE_S = 0.5  # before an answer breaks off: a browser drops what it has not read by then


@dataclass
class BreakingProxy:
    """`cuts` maps words of a request's first line to the bytes after which its connection breaks, one entry of the list
    for each break: bytes of the answer, or of the request where `uploads` is set. `broke` is called at each break. With
    `silent` a request is lost without a word: nobody hears more of it, and its connection stays.
    """

    target: int
    cuts: dict[str, list[int]] = field(default_factory=dict)
    uploads: bool = False
    silent: bool = False
    broke: Callable[[], None] = lambda: None
    broken: list[str] = field(default_factory=list)
    port: int = 0
    clients: list[socket.socket] = field(default_factory=list)

    @property
    def url(self) -> str:
        """http://host:port"""
        return f"http://127.0.0.1:{self.port}"

    def lose(self) -> None:
        """End every connection, and reach nobody until there is a `target` again."""
        self.target = 0
        for client in self.clients:
            with suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)

    def carry(self, client: socket.socket) -> None:
        """One connection, both ways, until it ends or is broken off."""
        try:
            service = socket.create_connection(("127.0.0.1", self.target))
        except OSError:
            client.close()
            return
        with client, service:
            left: list[tuple[str, int]] = []
            back = threading.Thread(target=self._back, args=(service, client, left))
            back.start()
            with suppress(OSError):
                while data := client.recv(1 << 16):
                    line = data.partition(b"\r\n")[0]
                    for words, cuts in self.cuts.items():
                        if words.encode() in line and cuts:
                            left[:] = [(words, cuts.pop(0))]
                    if self.uploads and left and self._spent(left, len(data)):
                        self.broke()
                        while self.silent and client.recv(1 << 16):
                            pass
                        break
                    service.sendall(data)
            for end in (service, client):
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
            back.join()

    def _back(self, service: socket.socket, client: socket.socket, left: list[tuple[str, int]]) -> None:
        with suppress(OSError):
            while data := service.recv(1 << 14):
                if not self.uploads and left and self._spent(left, len(data)):
                    time.sleep(PAUSE_S)
                    self.broke()
                    break
                client.sendall(data)
        for end in (client, service):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _spent(self, left: list[tuple[str, int]], size: int) -> bool:
        """Count bytes; whether the connection is to break now."""
        words, bound = left.pop()
        if size >= bound:
            self.broken.append(words)
            return True
        left.append((words, bound - size))
        return False


@contextmanager
def breaking_proxy(target: int, *, uploads: bool = False) -> Iterator[BreakingProxy]:
    """A proxy to a port of this machine, until the block ends."""
    proxy = BreakingProxy(target, uploads=uploads)
    listener = socket.create_server(("127.0.0.1", 0))
    proxy.port = listener.getsockname()[1]
    threads: list[threading.Thread] = []

    def accept() -> None:
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                proxy.clients.append(client)
                threads.append(threading.Thread(target=proxy.carry, args=(client,)))
                threads[-1].start()

    accepting = threading.Thread(target=accept)
    accepting.start()
    try:
        yield proxy
    finally:
        for end in (listener, *proxy.clients):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        for thread in (accepting, *threads):
            thread.join(60)
