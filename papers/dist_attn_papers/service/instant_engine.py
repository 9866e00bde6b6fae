"""An engine that answers at once, with rows of zeros or of noise: for measurements of what stands before it."""

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt
import zmq

from dist_attn.wire.messages import (
    Accepted,
    AnyMessage,
    Cancel,
    Credit,
    Done,
    GetStatus,
    OpenWork,
    Rows,
    Status,
    Tokens,
    decode,
    encode,
)
from dist_attn_papers.service.instant_sessions import InstantSessions

__all__ = ["InstantEngine"]

CREDIT = 1 << 16
NOISE_ROWS = 4096  # then they come again


@dataclass
class _Open:
    window: int
    seen: int = 0
    rows: int = 0


@dataclass
class InstantEngine:
    """Encodings of windows; counts tokens that came, documents that ended and those that were cancelled.

    With `noise` each row is a direction of its own, with `sessions` texts go on.
    """

    hidden_size: int
    vocab_size: int
    noise: bool = False
    sessions: InstantSessions | None = None
    tokens: int = 0
    done: int = 0
    cancelled: int = 0
    _open: dict[str, _Open] = field(default_factory=dict)

    @contextmanager
    def behind(self, address: str) -> Iterator[None]:
        """Listen at the address, in a thread, until the block ends."""
        context, stopped = zmq.Context[zmq.Socket[bytes]](), threading.Event()
        socket = context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.RCVTIMEO, 50)
        socket.setsockopt(zmq.SNDHWM, 0)  # such a socket drops what is too much
        socket.bind(address)

        def run() -> None:
            while not stopped.is_set():
                try:
                    peer, data = socket.recv_multipart()
                except zmq.Again:
                    continue
                for answer in self._answers(decode(data)):
                    socket.send_multipart([peer, encode(answer)])

        thread = threading.Thread(target=run, name="instant-engine")
        thread.start()
        try:
            yield
        finally:
            stopped.set()
            thread.join()
            context.destroy(0)

    def _answers(self, message: AnyMessage) -> Iterable[AnyMessage]:
        match message:
            case GetStatus():
                return [self._status()]
            case OpenWork(kind="encoding", request_id=name, rows=rows) if rows is not None:
                self._open[name] = _Open(rows.window)
                return [Accepted(name), Credit(name, CREDIT)]
            case Tokens(request_id=name) if name in self._open:
                return self._read(name, self._open[name], len(message.tokens) // 4, message.final)
            case Cancel(request_id=name):
                self.cancelled += self._open.pop(name, None) is not None
        return self.sessions.answers(message) if self.sessions is not None else ()

    def _read(self, name: str, work: _Open, count: int, final: bool) -> list[AnyMessage]:
        self.tokens += count
        work.seen += count
        edges = list(range(work.rows * work.window, work.seen + 1, work.window))
        if final and edges[-1] < work.seen:
            edges.append(work.seen)
        answers: list[AnyMessage] = [Credit(name, work.seen + CREDIT)]
        number = len(edges) - 1
        if number:
            answers.append(Rows(name, work.rows, edges[:-1], edges[1:], self._vectors(work.rows, number)))
            work.rows += number
        if final:
            del self._open[name]
            self.done += 1
            answers.append(Done(name, work.seen, 0, work.rows))
        return answers

    def _vectors(self, first: int, number: int) -> bytes:
        if not self.noise:
            return bytes(4 * self.hidden_size * number)
        return self._rows[np.arange(first, first + number) % NOISE_ROWS].astype("<f4").tobytes()

    @cached_property
    def _rows(self) -> npt.NDArray[np.float32]:
        return np.random.default_rng(0).standard_normal((NOISE_ROWS, self.hidden_size), np.float32)

    def _status(self) -> Status:
        return Status(
            ready=True,
            reason="ready",
            model="instant",
            hidden_size=self.hidden_size,
            vocab_size=self.vocab_size,
            backend="none",
            epoch=1,
            step=1,
            queued=0,
            active=len(self._open),
            tokens_per_second=0.0,
            ranks=[],
            manifest=self.sessions.manifest if self.sessions is not None else None,
        )
