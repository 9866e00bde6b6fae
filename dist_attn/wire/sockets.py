"""ZeroMQ sockets for the typed messages: a bounded `Router` that notices dead peers, a `Dealer` with deadlines.

A socket belongs to the thread that made it. Every queue is bounded, every wait has a deadline, and closing never hangs.
The names of ranks hold the controller's own name and the epoch, which keeps apart ranks of older ones.
"""

from collections.abc import Callable
from enum import Enum
from typing import Self, final

import zmq

from dist_attn.errors import ConfigError, WireError
from dist_attn.wire.curve import ClientKeys, ServerKeys
from dist_attn.wire.messages import MAX_MESSAGE_BYTES, AnyMessage, decode, encode

QUEUE_MESSAGES = 256  # per peer and direction; a full queue is reported, never waited for
IPC_PATH_BYTES = 107  # sockaddr_un.sun_path, without its closing zero
CLOSE_LINGER_MS = 1000


class Sent(Enum):
    """The result of sending a message."""

    DONE = "done"  # handed to ZeroMQ
    FULL = "full"  # the peer does not read; try again later
    GONE = "gone"  # no such peer: it was never there, or it has died


Send = Callable[[bytes, AnyMessage], Sent]
"""A function that hands a message for the peer of this identity to ZeroMQ, without ever waiting."""


def check_address(address: str) -> str:
    """Return the address, if a socket could use it.

    Raises: ConfigError naming what is wrong with it.
    """
    scheme, separator, place = address.partition("://")
    several = "://" in place or ("," in place and scheme == "tcp")  # as an API takes; a path may have commas
    if not separator or scheme not in ("ipc", "tcp") or not place or several:
        raise ConfigError(f"address {address!r} cannot be used: give one ipc://PATH or tcp://HOST:PORT")
    if scheme == "ipc" and len(place.encode()) > IPC_PATH_BYTES:
        raise ConfigError(
            f"the path of {address!r} has {len(place.encode())} bytes; a socket path may have {IPC_PATH_BYTES}: "
            "choose a shorter folder"
        )
    return address


@final
class Router:
    """A bound socket with many peers, each known by its identity; with `keys` encrypted, for those on a list alone.

    Raises: ConfigError if the address cannot be bound.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, keys: ServerKeys | None = None) -> None:
        check_address(address)
        self.socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        _limit(self.socket)
        if keys is not None:
            keys.apply(self.socket)
        try:
            self.socket.bind(address)
        except zmq.ZMQError as error:
            self.socket.close(0)
            raise ConfigError(f"cannot listen on {address}: {error.strerror}; choose another address") from None

    def send(self, peer: bytes, message: AnyMessage) -> Sent:
        """Hand a message to ZeroMQ without waiting.

        Raises: WireError if it is larger than a message may be.
        """
        try:
            self.socket.send_multipart((peer, encode(message)), zmq.DONTWAIT)
        except zmq.Again:
            return Sent.FULL
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return Sent.GONE
            raise
        return Sent.DONE

    def receive(self) -> tuple[bytes, AnyMessage | WireError] | None:
        """Take the next message that has arrived, with its sender, or None; never waits.

        An unreadable message comes back as the WireError, so that one bad peer cannot stop the others.
        """
        try:
            frames = self.socket.recv_multipart(zmq.DONTWAIT)
        except zmq.Again:
            return None
        if len(frames) != 2:
            return frames[0], WireError(f"a message of {len(frames) - 1} parts; needed is exactly one")
        try:
            return frames[0], decode(frames[1])
        except WireError as error:
            return frames[0], error

    def close(self) -> None:
        """Send what is queued, within a second in the background, and close."""
        self.socket.close(CLOSE_LINGER_MS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@final
class Dealer:
    """A connected socket with one peer, which need not be there yet.

    Raises: ConfigError for an address that cannot be used.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        identity: str,
        keys: ClientKeys | None = None,
    ) -> None:
        check_address(address)
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.IDENTITY, identity.encode())
        self.socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self.socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        _limit(self.socket)
        if keys is not None:
            keys.apply(self.socket)
        try:
            self.socket.connect(address)
        except zmq.ZMQError as error:
            self.socket.close(0)
            raise ConfigError(f"cannot connect to {address}: {error.strerror}; check the address") from None
        self._address = address

    def send(self, message: AnyMessage, timeout_s: float = 0.0) -> None:
        """Send a message, waiting at most `timeout_s` for room in the queue.

        Raises: WireError if there was no room in time, as after a peer has refused the connection, or the message is
            too large.
        """
        data = encode(message)
        if not self.socket.poll(int(timeout_s * 1000), zmq.POLLOUT):
            raise WireError(
                f"{type(message).__name__} could not be sent to {self._address} within {timeout_s:g} s: "
                "the peer does not read, or has refused the connection for its keys"
            )
        self.socket.send(data, zmq.DONTWAIT)

    def receive(self, timeout_s: float = 0.0) -> AnyMessage | None:
        """Take the next message, or None if none comes within `timeout_s`.

        Raises: WireError for an unreadable one.
        """
        if not self.socket.poll(int(timeout_s * 1000), zmq.POLLIN):
            return None
        frames = self.socket.recv_multipart(zmq.DONTWAIT)
        if len(frames) != 1:
            raise WireError(f"a message of {len(frames)} parts; needed is exactly one")
        return decode(frames[0])

    def close(self, linger_ms: int = CLOSE_LINGER_MS) -> None:
        """Send what is queued, within `linger_ms` in the background, and close; with 0 it is dropped."""
        self.socket.close(linger_ms)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _limit(socket: zmq.Socket[bytes]) -> None:
    """Bound what a peer can make this process hold."""
    socket.setsockopt(zmq.LINGER, CLOSE_LINGER_MS)
    socket.setsockopt(zmq.SNDHWM, QUEUE_MESSAGES)
    socket.setsockopt(zmq.RCVHWM, QUEUE_MESSAGES)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)


def agent_identity(name: str, pid: int, connection: int = 0) -> bytes:
    """The name of an agent: its host, process and connection, so that an agent that starts again has another one."""
    return f"agent-{name}-{pid}-{connection}".encode()


def rank_identity(epoch: int, rank: int, engine: str = "") -> bytes:
    """The name of a rank's main thread, which takes steps."""
    return f"rank-{engine}-{epoch}-{rank}".encode()


def beat_identity(epoch: int, rank: int, engine: str = "") -> bytes:
    """The name of a rank's heartbeat thread."""
    return f"beat-{engine}-{epoch}-{rank}".encode()
