"""Requests as the routes have them, and streamed answers without their connections: what to ask next, and what came."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from urllib.parse import quote

from dist_attn_client.errors import BrokenOff
from dist_attn_client.lines import Decoder, Event
from dist_attn_client.sources import Source

__all__ = ["Call", "Finished", "Plan", "Reached", "path_of"]

Item = TypeVar("Item")
End = TypeVar("End")


@dataclass(frozen=True)
class Call:
    """A request as the routes have it. `repeatable`: sent twice it does no harm (RFC 9110, 9.2.2; or it has a key).

    Values of the query that are None are left out. The body is `json`, or `source` from byte `start` on.
    """

    method: str
    path: str
    query: Mapping[str, str | int | None] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    json: Any = None
    source: Source | None = None
    start: int = 0
    repeatable: bool = False

    @property
    def what(self) -> str:
        """As messages name it."""
        return f"{self.method} {self.path}"


def path_of(*parts: str) -> str:
    """A path of such parts, each quoted: whatever an id holds, it stays one part."""
    return "/" + "/".join(quote(part, safe="") for part in parts)


@dataclass(frozen=True)
class Finished(Generic[End]):
    """The end of a stream, and what it came to."""

    value: End


@dataclass(frozen=True)
class Reached:
    """How far the sending has come. Units: bytes; `total` is None where it is not known."""

    sent: int
    total: int | None


class Plan(ABC, Generic[Item, End]):
    """A streamed answer, without the connection: what to ask for next, and what came.

    A plan is asked again after a lost connection, so it knows where it stands.
    """

    @abstractmethod
    def call(self) -> Call:
        """The request that goes on from here."""

    @abstractmethod
    def decoder(self) -> Decoder:
        """What cuts the answer into parts."""

    @abstractmethod
    def take(self, part: bytes | Event) -> Iterable[Item | Finished[End]]:
        """What a part of the answer says.

        Raises: ClientError for a part that says that the stream has failed.
        """

    def begin(self, headers: Mapping[str, str]) -> None:
        """Look at the head of an answer."""

    def end(self) -> Iterable[Item | Finished[End]]:
        """What the end of a body says; of most streams that it came too early.

        Raises: BrokenOff.
        """
        raise BrokenOff(f"{self.call().what}: the answer ended without its last part")

    @property
    def resumable(self) -> bool:
        """Whether `call` may be sent again, now."""
        return True
