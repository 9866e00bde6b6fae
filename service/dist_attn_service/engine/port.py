"""The connection to the engine's controller: open requests, and its health; over ZeroMQ, or in memory in tests."""

import asyncio
import contextlib
import secrets
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import msgspec
import structlog
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from dist_attn.errors import WireError
from dist_attn.wire.curve import ClientKeys
from dist_attn.wire.manifest import Manifest
from dist_attn.wire.messages import (
    MAX_MESSAGE_BYTES,
    AnyMessage,
    Checkpoint,
    Failed,
    GetStatus,
    OpenWork,
    Status,
    decode,
    encode,
)
from dist_attn.wire.sockets import CLOSE_LINGER_MS
from dist_attn_service.base.errors import Code, EngineFailure, EngineUnavailable
from dist_attn_service.base.tasks import stop_tasks
from dist_attn_service.engine.resending import GivenMemory
from dist_attn_service.engine.stream import EngineStream, StreamLimits

HEARTBEAT_MS, LOST_MS = 2_000, 10_000
DeleteBlob = Callable[[str], Coroutine[Any, Any, None]]


class OpenStreams:
    """The requests in flight by id; each gets the messages of the controller that are its own."""

    def __init__(self, limits: StreamLimits, memory: GivenMemory | None = None) -> None:
        self._limits = limits
        self._streams: dict[str, EngineStream] = {}
        self._memory = memory or GivenMemory(limits.resend_bytes)
        self._epoch, self._step = 0, 0
        self._deletions: set[asyncio.Task[None]] = set()
        self.delete_blob: DeleteBlob | None = None
        """Deletes a state that the engine has stored and nobody takes: its request is over, or does not want it."""

    def __len__(self) -> int:
        return len(self._streams)

    def open(self, work: OpenWork, post: Callable[[AnyMessage], None]) -> EngineStream:
        """Open a stream and post its opening message, under the id of the work with an ending that makes it unique."""
        draw = work.draw
        if draw is not None and draw.seed is None:  # settled here: another controller draws the same tokens
            draw = msgspec.structs.replace(draw, seed=secrets.randbits(63))
        work = msgspec.structs.replace(work, request_id=_unique(work.request_id), draw=draw)
        stream = EngineStream(work, post, self._forget, self._discard, self._limits, self._memory)
        self._streams[work.request_id] = stream
        stream.trace.moved(self._epoch, self._step)
        post(work)
        return stream

    def moved(self, epoch: int, step: int) -> None:
        """Note the epoch and step that the engine has reached, for the traces."""
        self._epoch, self._step = epoch, step
        for stream in self._streams.values():
            stream.trace.moved(epoch, step)

    def route(self, message: AnyMessage) -> None:
        """Deliver a message to the stream it belongs to; if the request is over, drop it, and discard its state."""
        stream = self._streams.get(getattr(message, "request_id", ""))
        if stream is not None:
            stream.deliver(message)
        elif isinstance(message, Checkpoint):
            self._discard(message)

    def fail(self, request_id: str, message: str) -> None:
        """End the open stream of this id, if there is one, with an error of the engine."""
        stream = self._streams.get(request_id)
        if stream is not None:
            stream.fail(EngineFailure(message))

    def fail_all(self, message: str, code: Code) -> None:
        """End every open stream with an error."""
        for stream in list(self._streams.values()):
            stream.fail(EngineFailure(message, code=code))

    def hold_all(self, message: str, code: Code) -> None:
        """Let streams whose work another controller can do again wait for one, and end the others: this one is gone."""
        for stream in list(self._streams.values()):
            if not stream.hold():
                stream.fail(EngineFailure(message, code=code))

    def fail_held(self, message: str, code: Code, request_id: str = "") -> None:
        """End the streams that wait for another controller, or the one of this id if it does: none has come."""
        for stream in self.held:
            if request_id in ("", stream.request_id):
                stream.fail(EngineFailure(message, code=code))

    @property
    def held(self) -> list[EngineStream]:
        """The streams that wait for another controller."""
        return [stream for stream in self._streams.values() if stream.held]

    def do_again(self) -> int:
        """Give the work of the streams that wait, and may go on, to another controller; return how many they are."""
        recorded = [stream for stream in self.held if stream.recorded]
        for stream in recorded:
            self.take_over(stream)
        return len(recorded)

    def take_over(self, stream: EngineStream, post: Callable[[AnyMessage], None] | None = None) -> None:
        """Give the work of a stream that waits, perhaps on another engine, to the controller that `post` reaches."""
        request_id = _unique(stream.request_id.rpartition(".")[0])
        self._streams[request_id] = stream
        stream.do_again(request_id, post, self._forget)

    def _discard(self, state: Checkpoint) -> None:
        if state.blob and self.delete_blob is not None:
            task = asyncio.create_task(self.delete_blob(state.blob), name="state-discard")
            self._deletions.add(task)
            task.add_done_callback(self._deletions.discard)

    def _forget(self, request_id: str) -> None:
        self._streams.pop(request_id, None)


def _unique(name: str) -> str:
    return f"{name}.{uuid.uuid4().hex[:12]}" if name else uuid.uuid4().hex


_HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


@dataclass(frozen=True)
class EngineHealth:
    """The health of the engine now; `reason` says in words why it is not ready.

    `age` is that of `status` in seconds.
    """

    ready: bool
    reason: str
    status: Status | None = None
    age: float = 0.0


class EngineKind(NamedTuple):
    """The model that an engine runs and its way of computing, which has no manifest where no states can be stored."""

    model: str
    vocab_size: int
    hidden_size: int
    manifest: Manifest | None
    backend: str

    @classmethod
    def of(cls, status: Status) -> "EngineKind":
        """The kind of an engine. The manifest tells more of its computation than the backend."""
        backend = "" if status.manifest else status.backend
        return cls(status.model, status.vocab_size, status.hidden_size, status.manifest, backend)


class EnginePort(Protocol):
    """The connection to an engine, as the service needs it."""

    async def start(self) -> None:
        """Begin to talk to the engine; returns at once, whether or not it answers."""

    async def close(self) -> None:
        """Fail all open streams, and disconnect from the engine."""

    def health(self) -> EngineHealth:
        """The newest health, not ready where its status is older than the port accepts; never waits."""

    def engines(self) -> Mapping[str, EngineHealth]:
        """The health of each of several engines by its address; empty where there is one alone."""

    def kind(self, like: Manifest | None = None) -> EngineKind | None:
        """The kind of the engine that is next to get work, of several the one nearest to `like`; None: none is known.

        Engines of one kind give equal bits.
        """

    def open(self, work: OpenWork, like: Manifest | None = None, only: EngineKind | None = None) -> EngineStream:
        """Start work, under its request id with an ending that makes it unique.

        Of several engines it goes to one that computes as `like` says, or to one of the kind that most are of; with
        `only` to none but this kind, as all work of a request must that opens several streams.

        Raises: EngineUnavailable without a connection to the controller.
        """

    def discard_with(self, delete_blob: DeleteBlob) -> None:
        """Have stored states that nobody takes deleted by this."""


class ZmqEnginePort:
    """The engine behind a controller's ROUTER socket: one DEALER, one task that reads it.

    The send side has no high-water mark: what is posted is bounded by the credit the controller gives
    and by the number of open requests. The receive side has none either, so that nothing is ever
    dropped; the reader empties it into the streams' bounded inboxes. Ports of one process share the `memory` for what
    is sent again.
    """

    def __init__(
        self,
        address: str,
        limits: StreamLimits,
        log: structlog.typing.FilteringBoundLogger,
        *,
        status_seconds: float = 0.4,
        stale_seconds: float = 2.0,
        keys: ClientKeys | None = None,
        memory: GivenMemory | None = None,
    ) -> None:
        self._log = log
        self._status_seconds = status_seconds
        self._stale_seconds = stale_seconds
        self._memory = memory or GivenMemory(limits.resend_bytes)
        self._streams = OpenStreams(limits, self._memory)
        self._limits = limits
        self._giving_up: asyncio.TimerHandle | None = None
        self._model_unknown = False  # a controller has come whose model is not known yet
        self._kind: EngineKind | None = None
        self._context: zmq.asyncio.Context | None = None
        self._socket: zmq.asyncio.Socket | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._keys = keys
        self._connected = False
        self._refused = ""
        self._status: Status | None = None
        self._status_at = 0.0
        self._of_others = 0
        self.address = address
        self.changed: Callable[[], None] = lambda: None
        """Called when the engine's health may have changed, or requests wait for another controller."""

    async def start(self) -> None:
        """Connect (ZeroMQ keeps trying by itself) and start reading, polling and watching the connection."""
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, CLOSE_LINGER_MS)  # a last Cancel may still leave
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 100)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        if self._memory.several:  # another engine goes on where a host has vanished, of which TCP alone says nothing
            self._socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
            self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, LOST_MS)
        if self._keys is not None:
            self._keys.apply(self._socket)
        monitor = self._socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | _HANDSHAKE_FAILED
        )
        self._socket.connect(self.address)
        self._tasks = [
            asyncio.create_task(self._read(self._socket), name="engine-port-read"),
            asyncio.create_task(self._poll(), name="engine-port-status"),
            asyncio.create_task(self._watch(monitor), name="engine-port-connection"),
        ]
        for task in self._tasks:
            task.add_done_callback(self._task_ended)

    async def close(self) -> None:
        """Fail all open streams, stop the tasks, close the sockets; a second call does nothing."""
        self._streams.fail_all("the service is stopping; send the request again", Code.STOPPING)
        self._stop_giving_up()
        if self._socket is not None:
            self._socket.disable_monitor()  # while it is read: an event that nobody takes would block ZeroMQ for ever
        await stop_tasks(*self._tasks)
        if self._socket is not None and self._context is not None:
            self._socket.close()
            self._context.destroy()
            self._socket = self._context = None

    def health(self) -> EngineHealth:
        """The health by the newest Status; not ready if that is too old."""
        if not self._connected:
            return EngineHealth(False, f"no connection to the engine's controller at {self.address}{self._refused}")
        if self._status is None:
            return EngineHealth(False, f"the engine's controller at {self.address} has not answered yet")
        age = time.monotonic() - self._status_at
        if age > self._stale_seconds:
            return EngineHealth(False, f"the engine's controller has not answered for {age:.1f} s", self._status, age)
        return EngineHealth(self._status.ready, self._status.reason, self._status, age)

    @property
    def load(self) -> int:
        """The requests in the engine: this process's now, and those of others by its newest status."""
        return len(self._streams) + self._of_others

    def kind(self, like: Manifest | None = None) -> EngineKind | None:
        """The kind of the engine; None before it is known."""
        return self._kind

    @property
    def held(self) -> list[EngineStream]:
        """The requests that wait for another controller."""
        return self._streams.held

    def take_over(self, stream: EngineStream) -> None:
        """Do the work of a request again that waits on another port."""
        self._streams.take_over(stream, self._post)

    def engines(self) -> Mapping[str, EngineHealth]:
        """The others of several: none."""
        return {}

    def open(self, work: OpenWork, like: Manifest | None = None, only: EngineKind | None = None) -> EngineStream:
        """Post the opening message of a request.

        Raises: EngineUnavailable without a connection.
        """
        if not self._connected:
            raise EngineUnavailable(self.health().reason, code=Code.ENGINE_UNREACHABLE)
        return self._streams.open(work, self._post)

    def discard_with(self, delete_blob: DeleteBlob) -> None:
        """Have stored states that nobody takes deleted by this."""
        self._streams.delete_blob = delete_blob

    def _post(self, message: AnyMessage) -> None:
        if self._socket is None:
            return
        asyncio.ensure_future(self._socket.send(encode(message), copy=True)).add_done_callback(_consume)

    async def _read(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            data = await socket.recv()
            try:
                message = decode(data)
            except WireError as error:
                # Its request would wait for the lost message, and so ends here; the other requests go on.
                self._log.error("unreadable message from the controller", error=str(error))
                self._streams.fail(error.request_id, f"the engine's answer could not be read: {error}")
                continue
            if isinstance(message, Status):
                self._status, self._status_at = message, time.monotonic()
                self._of_others = max(0, message.queued + message.active - len(self._streams))
                self._streams.moved(message.epoch, message.step)
                if message.hidden_size:  # its ranks have the model
                    self._model_known(message)
                self._tell()
                continue
            try:
                self._streams.route(message)
                if self._memory.several and isinstance(message, Failed):
                    self._refused_work(message)
            except Exception as error:  # a bug of ours, which ends this request and not the reading of other messages
                self._log.exception("an answer of the engine could not be taken", error=repr(error))
                self._streams.fail(getattr(message, "request_id", ""), "the engine's answer could not be taken")

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        """Log a task that has ended by itself, which is a bug, and let no request wait for it."""
        if not task.cancelled():
            self._connected = False
            self._log.error("engine port task ended", task=task.get_name(), error=repr(task.exception()))
            self._streams.fail_all("the connection to the engine stopped working", Code.ENGINE_UNREACHABLE)

    def _refused_work(self, failed: Failed) -> None:
        """Let other engines do what this one will not, and end it where for a while none has.

        One that has said that it is not ready is taken for that until its next status.
        """
        if failed.code in (Code.STOPPING, Code.ENGINE_NOT_READY):
            if self._status is not None:
                self._status = msgspec.structs.replace(self._status, ready=False, reason=failed.message)
            self._tell()
        if any(stream.request_id == failed.request_id for stream in self.held):
            later = asyncio.get_running_loop().call_later
            later(self._limits.resend_seconds, self._end_refused, failed.request_id, failed.message)

    def _tell(self) -> None:
        """Say that something has changed; a bug in what follows does not end the reading of this connection."""
        try:
            self.changed()
        except Exception as error:
            self._log.exception("requests could not be handed on", error=repr(error))

    def _end_refused(self, request_id: str, reason: str) -> None:
        """End a request that still waits where it was refused; once the connection broke its own end counts."""
        if self._connected and not self._model_unknown:
            seconds = self._limits.resend_seconds
            words = f"{reason}: no other one came within {seconds:g} s"
            self._streams.fail_held(words, Code.ENGINE_UNREACHABLE, request_id)

    async def _poll(self) -> None:
        while True:
            if self._connected:
                self._post(GetStatus())
            await asyncio.sleep(self._status_seconds)

    def _controller_lost(self) -> None:
        """Let work that another controller can do again wait for one, for a while: this one is gone."""
        words = "the connection to the engine's controller broke; send the request again"
        self._streams.hold_all(words, Code.ENGINE_UNREACHABLE)
        seconds = self._limits.resend_seconds
        self._give_up(seconds, f"{words}: no other one came within {seconds:g} s")
        self._tell()

    def _controller_came(self) -> None:
        """Wait, for a while, until the ranks of the new controller say what they run; then the held work goes on."""
        self._model_unknown = True
        seconds = self._limits.silence_seconds
        self._give_up(seconds, f"the engine was started again, and no rank was there within {seconds:g} s")

    def _model_known(self, status: Status) -> None:
        """Let waiting work go on if the engine runs the very same model in the same way as before, and else end it."""
        before, self._kind = self._kind, EngineKind.of(status)
        if not self._model_unknown:
            return
        self._model_unknown = False
        self._stop_giving_up()
        if before not in (None, self._kind):
            words = (
                "the engine was started again with another model, or computes in another way; send the request again"
            )
            self._streams.fail_held(words, Code.ENGINE_UNREACHABLE)
        elif again := self._streams.do_again():
            self._log.info("open requests go on with another controller", requests=again)

    def _give_up(self, seconds: float, words: str) -> None:
        """End the work that still waits for another controller after so many seconds from now."""
        self._stop_giving_up()
        later = asyncio.get_running_loop().call_later
        self._giving_up = later(seconds, self._streams.fail_held, words, Code.ENGINE_UNREACHABLE)

    def _stop_giving_up(self) -> None:
        if self._giving_up is not None:
            self._giving_up.cancel()
            self._giving_up = None

    async def _watch(self, monitor: zmq.asyncio.Socket) -> None:
        """Follow the connection: when a controller goes away, requests wait for another one or end."""
        try:
            while True:
                event = await recv_monitor_message(monitor)
                if event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    self._connected = True
                    self._refused = ""
                    self._status = None
                    self._post(GetStatus())
                    self._controller_came()
                elif event["event"] == zmq.EVENT_DISCONNECTED:
                    self._connected = False
                    self._controller_lost()
                elif event["event"] & _HANDSHAKE_FAILED and not self._refused:
                    self._refused = ": the keys of one are not those that the other expects (engine.keys_dir)"
                    self._log.error("handshake with the controller failed", address=self.address)
        finally:
            with contextlib.suppress(zmq.ZMQError):
                monitor.close(0)


def _consume(future: "asyncio.Future[Any]") -> None:
    """Take the error of a send, so that asyncio does not report it: one that fails at close is no fault."""
    if not future.cancelled():
        future.exception()
