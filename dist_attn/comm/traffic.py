"""What a rank has sent and received: bytes by formula, messages, and the order of its calls."""

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["Event", "Traffic"]

EVENTS_KEPT = 4096

Phase = Literal["call", "launch", "wait", "mark"]


@dataclass(frozen=True, slots=True)
class Event:
    """One entry of the log: a blocking call, the launch or the wait of an asynchronous one, or a mark.

    Bytes are counted once, at the call or launch. `seconds` is how long this rank could do nothing else; two events
    are equal whatever time they took.
    """

    name: str
    phase: Phase
    bytes_sent: int = 0
    bytes_received: int = 0
    label: str = ""
    seconds: float = field(default=0.0, compare=False)
    messages: int = field(default=0, compare=False)


@dataclass(slots=True)
class Traffic:
    """Running totals of one rank and its last calls in order, oldest first.

    Bytes are payload, as if every pair of ranks that has something to say exchanges one direct message; what a
    back end adds (headers, trees, copies between devices) is not counted. `exposed_s` is the time this rank spent in
    exchanges: in blocking calls, launches and waits, but not what an exchange took while the rank computed.

    Units: bytes; seconds; messages are the ones this rank sends.
    """

    bytes_sent: int = 0
    bytes_received: int = 0
    messages: int = 0
    calls: int = 0
    exposed_s: float = 0.0
    events: deque[Event] = field(default_factory=lambda: deque(maxlen=EVENTS_KEPT))

    def record(self, event: Event, messages: int = 0) -> None:
        """Add one event to the log and its bytes to the totals."""
        self.bytes_sent += event.bytes_sent
        self.bytes_received += event.bytes_received
        self.messages += messages
        self.calls += event.phase in ("call", "launch")
        self.exposed_s += event.seconds
        self.events.append(event)

    def mark(self, name: str) -> None:
        """Note in the log that something local happens now, so that its place among the calls can be read off."""
        self.events.append(Event(name, "mark"))

    def order(self) -> list[str]:
        """The log as short lines: `all_gather launch`, `local outputs mark`, `all_gather wait`."""
        return [f"{event.label or event.name} {event.phase}" for event in self.events]

    def clear(self) -> None:
        """Start again at zero."""
        self.bytes_sent = self.bytes_received = self.messages = self.calls = 0
        self.exposed_s = 0.0
        self.events.clear()
