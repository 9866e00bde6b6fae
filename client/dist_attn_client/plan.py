"""Requests as the routes have them, and streamed answers without their connections: what to ask next, and what came.

Bytes of an answer are cut into its parts while they arrive: lines of JSON, server-sent events, or the bytes themselves.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Protocol, TypeVar, final
from urllib.parse import quote

from dist_attn_client.errors import BrokenOff
from dist_attn_client.sources import Source

Item = TypeVar("Item")
End = TypeVar("End")


@dataclass(frozen=True)
class Reached:
    """The part of a body that has been sent. Units: bytes; `total` is None where it is not known."""

    sent: int
    total: int | None


OnSent = Callable[[Reached], None]
"""Called with the progress whenever more bytes have gone out."""


@dataclass(frozen=True)
class Call:
    """A request as the routes have it. `repeatable`: sent twice it does no harm (RFC 9110, 9.2.2; or it has a key).

    Values of the query that are None are left out. The body is `json`, or `source` from byte `start` on, and `on_sent`
    is called with the progress of sending it.
    """

    method: str
    path: str
    query: Mapping[str, str | int | None] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    json: Any = None
    source: Source | None = None
    start: int = 0
    on_sent: OnSent | None = None
    repeatable: bool = False

    @property
    def what(self) -> str:
        """The request as messages name it: `POST /v1/jobs`."""
        return f"{self.method} {self.path}"


def path_of(*parts: str) -> str:
    """A path of such parts, each quoted: whatever an id holds, it stays one part."""
    return "/" + "/".join(quote(part, safe="") for part in parts)


def told(values: Mapping[str, Any]) -> dict[str, Any]:
    """Drop the values that are None."""
    return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class Finished(Generic[End]):
    """The end of a stream, and what it came to."""

    value: End


# ---- bytes into parts ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Event:
    """One server-sent event; `number` is its id, 0 without one."""

    data: bytes
    type: str = ""
    number: int = 0


class Decoder(Protocol):
    """A reader of bytes, however they were cut, that gives the parts that are whole."""

    def push(self, piece: bytes) -> "Iterator[bytes | Event]":
        """The parts that `piece` completes."""


@final
class RawDecoder:
    """Bytes as they come."""

    def push(self, piece: bytes) -> Iterator[bytes | Event]:
        """The piece itself."""
        if piece:
            yield piece


class _Lines:
    """A stream cut at its line ends. What has no line end yet waits."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def push(self, piece: bytes) -> list[bytes]:
        """The lines that `piece` ends."""
        *ended, rest = piece.split(b"\n")
        if ended:
            ended[0] = b"".join(self._parts) + ended[0]
            self._parts = []
        if rest:
            self._parts.append(rest)
        return ended


@final
class LineDecoder:
    """NDJSON: the lines, without those that are blank."""

    def __init__(self) -> None:
        self._lines = _Lines()

    def push(self, piece: bytes) -> Iterator[bytes | Event]:
        """The lines that `piece` ends."""
        yield from (line for line in self._lines.push(piece) if line.strip())


@final
class EventDecoder:
    """Server-sent events (WHATWG HTML, 9.2.6), as this service sends them; comments are passed over."""

    def __init__(self) -> None:
        self._lines = _Lines()
        self._fields: dict[str, bytes] = {}

    def push(self, piece: bytes) -> Iterator[bytes | Event]:
        """The events that `piece` ends."""
        for line in self._lines.push(piece):
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


# ---- streams -------------------------------------------------------------------------------------


class Plan(ABC, Generic[Item, End]):
    """A streamed answer, without the connection: what to ask for next, and what came.

    A plan is asked again after a lost connection, so it knows where it stands.
    """

    decoder: ClassVar[type[Decoder]]
    """The decoder that cuts an answer into parts."""

    @abstractmethod
    def call(self) -> Call:
        """The request that goes on from here."""

    @abstractmethod
    def take(self, part: bytes | Event) -> Iterable[Item | Finished[End]]:
        """Turn a part of the answer into items.

        Raises: ClientError for a part that says that the stream has failed.
        """

    def begin(self, headers: Mapping[str, str]) -> None:
        """Look at the head of an answer."""

    def end(self) -> Iterable[Item | Finished[End]]:
        """Take the end of the body, which for most streams came too early.

        Raises: BrokenOff.
        """
        raise BrokenOff(f"{self.call().what}: the answer ended without its last part")

    @property
    def resumable(self) -> bool:
        """Return whether `call` may be sent again now."""
        return True
