"""A small client of the controller for tests: the API's side of the wire, one thread, every wait has a deadline."""

import time
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
import zmq

from dist_attn.wire.curve import ClientKeys
from dist_attn.wire.messages import (
    Accepted,
    AnyMessage,
    Cancel,
    Credit,
    Done,
    Failed,
    Generated,
    GetStatus,
    Rows,
    RowSpec,
    SamplingSpec,
    Status,
    Tokens,
)
from dist_attn.wire.sockets import Dealer
from tests.support.opening import open_completion, open_encoding


@dataclass
class Request:
    """What has come back for one request."""

    accepted: bool = False
    credit: int = 0
    starts: list[int] = field(default_factory=list)
    stops: list[int] = field(default_factory=list)
    vectors: list[np.ndarray] = field(default_factory=list)
    done: Done | None = None
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    failed: Failed | None = None

    @property
    def ended(self) -> bool:
        return self.done is not None or self.finish_reason is not None or self.failed is not None

    @property
    def rows(self) -> np.ndarray:
        """All rows so far, [n, dim]."""
        return np.concatenate(self.vectors)


class ControllerClient:
    """One API process. `requests[id]` fills up while any of the waiting methods runs."""

    _count = 0

    def __init__(self, address: str, keys: ClientKeys | None = None) -> None:
        ControllerClient._count += 1
        self._context = zmq.Context(1)
        self._dealer = Dealer(self._context, address, f"client-{id(self)}-{ControllerClient._count}", keys)
        self._statuses: list[Status] = []
        self.requests: dict[str, Request] = defaultdict(Request)

    def __enter__(self) -> "ControllerClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Hang up."""
        self._dealer.socket.close(0)
        self._context.term()

    def send(self, message: AnyMessage) -> None:
        """Send any message."""
        self._dealer.send(message, 5.0)

    def pump(self, timeout_s: float) -> bool:
        """Take in what has arrived, waiting for at least one message; false if none came."""
        message = self._dealer.receive(timeout_s)
        heard = message is not None
        while message is not None:
            self._file(message)
            message = self._dealer.receive(0)
        return heard

    def wait_until(self, condition, timeout_s: float = 60.0, what: str = "") -> None:
        """Take in messages until the condition holds.

        Raises: TimeoutError naming what was waited for.
        """
        deadline = time.monotonic() + timeout_s
        while not condition():
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"waited {timeout_s:g} s for {what or condition}; requests: {dict(self.requests)}")
            self.pump(min(left, 0.2))

    def status(self, timeout_s: float = 60.0) -> Status:
        """The engine's status now."""
        self._statuses.clear()
        self.send(GetStatus())
        self.wait_until(lambda: self._statuses, timeout_s, "a status")
        return self._statuses[-1]

    def wait_for_status(self, condition, timeout_s: float = 60.0) -> Status:
        """Ask until the status fulfils the condition."""
        deadline = time.monotonic() + timeout_s
        while not condition(status := self.status()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"after {timeout_s:g} s the status is still {status}")
            self.pump(0.05)
        return status

    def wait_ready(self, timeout_s: float = 60.0) -> Status:
        """Wait until the engine is ready."""
        return self.wait_for_status(lambda status: status.ready, timeout_s)

    def open_encoding(self, name: str, rows: RowSpec | None = None) -> Request:
        """Open an encoding without tokens."""
        self.send(open_encoding(name, rows or RowSpec()))
        return self.requests[name]

    def open_completion(self, name: str, sampling: SamplingSpec) -> Request:
        """Open a completion without tokens."""
        self.send(open_completion(name, sampling))
        return self.requests[name]

    def feed(self, name: str, tokens, *, start: int = 0, final: bool = True, piece: int = 4096, timeout_s=60.0) -> None:
        """Send tokens as far as credit allows, and wait for more of it; stops when the request has ended."""
        tokens = np.asarray(tokens, dtype="<i4")
        request = self.requests[name]
        at = 0

        def may_send() -> bool:
            return request.ended or request.credit > start + at

        while True:
            self.wait_until(may_send, timeout_s, f"credit for {name}")
            stop = min(len(tokens), at + piece, request.credit - start)
            if request.ended:
                return
            last = stop == len(tokens)
            self.send(Tokens(name, start + at, tokens[at:stop].tobytes(), final and last))
            at = stop
            if last:
                return

    def cancel(self, name: str) -> None:
        """Cancel a request."""
        self.send(Cancel(name))

    def finish(self, name: str, timeout_s: float = 60.0) -> Request:
        """Wait for the end of a request.

        Raises: AssertionError if it failed.
        """
        request = self.requests[name]
        self.wait_until(lambda: request.ended, timeout_s, f"the end of {name}")
        assert request.failed is None, request.failed
        return request

    def encode(self, name: str, tokens, rows: RowSpec | None = None, timeout_s: float = 60.0) -> Request:
        """A whole encoding."""
        self.open_encoding(name, rows)
        self.feed(name, tokens, timeout_s=timeout_s)
        return self.finish(name, timeout_s)

    def complete(self, name: str, tokens, sampling: SamplingSpec, timeout_s: float = 60.0) -> Request:
        """A whole completion."""
        self.open_completion(name, sampling)
        self.feed(name, tokens, timeout_s=timeout_s)
        return self.finish(name, timeout_s)

    def _file(self, message: AnyMessage) -> None:
        if isinstance(message, Status):
            self._statuses.append(message)
            return
        request = self.requests[message.request_id]
        match message:
            case Accepted():
                request.accepted = True
            case Credit(upto=upto):
                request.credit = max(request.credit, upto)
            case Rows():
                assert message.first_row == len(request.starts), "rows out of order"
                request.starts += message.starts
                request.stops += message.stops
                request.vectors.append(np.frombuffer(message.vectors, dtype="<f4").reshape(len(message.starts), -1))
            case Done():
                request.done = message
            case Generated():
                request.tokens += message.tokens
                request.finish_reason = message.finish_reason
            case Failed():
                request.failed = request.failed or message
