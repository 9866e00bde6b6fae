"""HTTP by hand: for clients that send and read at the same time, stop in the middle, or break the rules."""

import json
import socket
import threading
from typing import Any


def head(path: str, *headers: str, method: str = "POST") -> bytes:
    """The head of a request."""
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: localhost", *headers, "", ""]).encode()


def chunk(data: bytes) -> bytes:
    """One chunk of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


LAST_CHUNK = b"0\r\n\r\n"
CHUNKED = "Transfer-Encoding: chunked"
TEXT = "Content-Type: text/plain"


class Answer:
    """An answer that is read while it arrives."""

    def __init__(self, connection: socket.socket) -> None:
        self._file = connection.makefile("rb")
        self.status = 0
        self.headers: dict[str, str] = {}

    def read_head(self) -> int:
        """Read status line and headers; 0 when the connection ends before."""
        line = self._file.readline()
        if not line:
            return 0
        self.status = int(line.split()[1])
        self.headers = {}
        while (line := self._file.readline().strip()) != b"":
            name, _, value = line.decode("latin-1").partition(":")
            self.headers[name.lower()] = value.strip()
        return self.status

    def read_chunk(self) -> bytes:
        """The next chunk; empty at the end of the body.

        Raises: EOFError when the connection ends before the body does.
        """
        size = self._file.readline()
        if not size.strip():
            raise EOFError("the body has no end")
        data = self._file.read(int(size, 16))
        self._file.readline()
        return data

    def read_body(self) -> bytes:
        """The rest of the body, chunked or by its length."""
        if "content-length" in self.headers:
            return self._file.read(int(self.headers["content-length"]))
        parts = []
        while part := self.read_chunk():
            parts.append(part)
        return b"".join(parts)

    def read_rest(self) -> bytes:
        """All that comes until the connection ends."""
        return self._file.read()

    def close(self) -> None:
        """Read no more; the connection ends with whoever else has it."""
        self._file.close()

    def at_end(self) -> bool:
        """Whether the server closed the connection."""
        return self._file.read(1) == b""


def lines_of(body: bytes) -> list[dict[str, Any]]:
    """NDJSON, strictly: every line whole and ended."""
    assert body.endswith(b"\n")
    return [json.loads(line) for line in body.splitlines()]


def send_in_background(connection: socket.socket, data: bytes) -> threading.Thread:
    """Send from a thread, so that a server that stops reading does not stop the test."""

    def send() -> None:
        try:
            connection.sendall(data)
        except OSError:
            return

    thread = threading.Thread(target=send)
    thread.start()
    return thread
