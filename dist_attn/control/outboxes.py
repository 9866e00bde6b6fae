"""Messages for API processes that do not take them yet: they wait here, and their requests rest meanwhile."""

from collections import deque
from collections.abc import Callable

from dist_attn.wire.messages import AnyMessage
from dist_attn.wire.sockets import Sent

__all__ = ["MOST_WAITING", "Outboxes"]

# Far above what the steps under way can bring (64 MiB of rows come in 256 messages): only a peer that asks and asks
# without ever reading gets here.
MOST_WAITING = 8192


class Outboxes:
    """One outbox per peer whose queue is full. `send` hands a message to ZeroMQ and never waits.

    An outbox holds what is already under way for its peer, because nothing new is started for a blocked one, and
    MOST_WAITING messages at most.
    """

    def __init__(self, send: Callable[[bytes, AnyMessage], Sent], deadline_s: float) -> None:
        self._send = send
        self._deadline_s = deadline_s
        self._waiting: dict[bytes, deque[AnyMessage]] = {}
        self._stuck_since: dict[bytes, float] = {}

    def post(self, peer: bytes, message: AnyMessage, now: float) -> Sent:
        """Send the message, after those that wait: DONE, FULL when it waits too, GONE when the peer is not there.

        A peer whose outbox is full counts as gone too.
        """
        waiting = self._waiting.get(peer)
        if waiting is not None and len(waiting) >= MOST_WAITING:
            return Sent.GONE
        sent = self._send(peer, message) if waiting is None else Sent.FULL
        if sent is Sent.FULL:
            self._waiting.setdefault(peer, deque()).append(message)
            self._stuck_since.setdefault(peer, now)
        return sent

    def blocked(self, peer: bytes) -> bool:
        """Whether messages wait for this peer."""
        return peer in self._waiting

    def flush(self, now: float) -> list[bytes]:
        """Try again; the peers that are gone, or took nothing for `deadline_s`, and whose messages are dropped."""
        gone = []
        for peer, waiting in list(self._waiting.items()):
            sent = Sent.DONE
            while waiting and sent is Sent.DONE:
                sent = self._send(peer, waiting[0])
                if sent is Sent.DONE:
                    waiting.popleft()
                    self._stuck_since[peer] = now
            if sent is Sent.GONE or now - self._stuck_since[peer] > self._deadline_s:
                gone.append(peer)
            if not waiting or peer in gone:
                del self._waiting[peer], self._stuck_since[peer]
        return gone
