"""Bytes of an answer into its parts while they arrive: lines of JSON, server-sent events, or the bytes themselves."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, final

__all__ = ["Decoder", "Event", "EventDecoder", "LineDecoder", "RawDecoder"]


@dataclass(frozen=True)
class Event:
    """One server-sent event; `number` is its id, 0 without one."""

    data: bytes
    type: str = ""
    number: int = 0


class Decoder(Protocol):
    """Takes bytes however they were cut, gives the parts that are whole."""

    def push(self, piece: bytes) -> "Iterator[bytes | Event]":
        """The parts that `piece` completes."""
        ...


@final
class RawDecoder:
    """Bytes as they come."""

    def push(self, piece: bytes) -> Iterator[bytes | Event]:
        """The piece itself."""
        if piece:
            yield piece


@final
class LineDecoder:
    """NDJSON: the lines, without those that are blank. What has no line end yet waits."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def push(self, piece: bytes) -> Iterator[bytes | Event]:
        """The lines that `piece` ends."""
        *ended, rest = piece.split(b"\n")
        if ended:
            ended[0] = b"".join(self._parts) + ended[0]
            self._parts = []
        if rest:
            self._parts.append(rest)
        yield from (line for line in ended if line.strip())


@final
class EventDecoder:
    """Server-sent events (WHATWG HTML, 9.2.6), as this service sends them; comments are passed over."""

    def __init__(self) -> None:
        self._rest = b""
        self._fields: dict[str, bytes] = {}

    def push(self, piece: bytes) -> Iterator[bytes | Event]:
        """The events that `piece` ends."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if not line:
                if "data" in self._fields:
                    yield self._event()
                self._fields = {}
                continue
            name, _, value = line.partition(b":")
            if name:  # otherwise it is a comment
                value = value.removeprefix(b" ")
                key = name.decode("utf-8", "replace")
                known = self._fields.get(key) if key == "data" else None
                self._fields[key] = value if known is None else known + b"\n" + value

    def _event(self) -> Event:
        number = self._fields.get("id", b"")
        kind = self._fields.get("event", b"").decode("utf-8", "replace")
        return Event(self._fields["data"], kind, int(number) if number.isdigit() else 0)
