"""The requests in flight: each under its own id, fed with its messages, given to another controller if need be."""

import secrets
import uuid
from collections.abc import Callable

import msgspec

from dist_attn.wire.messages import (
    Accepted,
    AnyMessage,
    Checkpoint,
    Credit,
    Done,
    Failed,
    Generated,
    OpenWork,
    Progress,
    Restored,
    Rows,
    StateCredit,
    StatePiece,
)
from dist_attn_service.base.errors import Code, EngineFailure
from dist_attn_service.engine.resending import GivenMemory
from dist_attn_service.engine.stream import EngineStream, StreamLimits

__all__ = ["OpenStreams"]

_OF_REQUESTS = (
    *(Accepted, Credit, Rows, Generated, Progress, Failed),
    *(Restored, StateCredit, StatePiece, Checkpoint, Done),
)


class OpenStreams:
    """The requests in flight by id; hands each message of the controller to its own."""

    def __init__(self, limits: StreamLimits) -> None:
        self._limits = limits
        self._streams: dict[str, EngineStream] = {}
        self._memory = GivenMemory(limits.resend_bytes)
        self._epoch, self._step = 0, 0

    def __len__(self) -> int:
        return len(self._streams)

    def open(self, work: OpenWork, post: Callable[[AnyMessage], None]) -> EngineStream:
        """A new stream whose opening message has been posted, under the id of the work and what makes it unique."""
        draw = work.draw
        if draw is not None and draw.seed is None:  # settled here: another controller draws the same tokens
            draw = msgspec.structs.replace(draw, seed=secrets.randbits(63))
        work = msgspec.structs.replace(work, request_id=_unique(work.request_id), draw=draw)
        stream = EngineStream(work, post, self._forget, self._limits, self._memory)
        self._streams[work.request_id] = stream
        stream.trace.moved(self._epoch, self._step)
        post(work)
        return stream

    def moved(self, epoch: int, step: int) -> None:
        """Where the engine is now, for the traces."""
        self._epoch, self._step = epoch, step
        for stream in self._streams.values():
            stream.trace.moved(epoch, step)

    def route(self, message: AnyMessage) -> None:
        """Deliver to the stream it belongs to; messages for requests that are over are dropped."""
        if isinstance(message, _OF_REQUESTS):
            stream = self._streams.get(message.request_id)
            if stream is not None:
                stream.deliver(message)

    def fail_all(self, message: str, code: Code) -> None:
        """End every open stream with an error."""
        for stream in list(self._streams.values()):
            stream.fail(EngineFailure(message, code=code))

    def hold_all(self, message: str, code: Code) -> None:
        """The controller is gone: streams whose work another one can do again wait for it, the others end."""
        for stream in list(self._streams.values()):
            if not stream.hold():
                stream.fail(EngineFailure(message, code=code))

    def fail_held(self, message: str, code: Code) -> None:
        """No other controller has come."""
        for stream in list(self._streams.values()):
            if stream.held:
                stream.fail(EngineFailure(message, code=code))

    def do_again(self) -> int:
        """Another controller is there: it is given the work of the streams that wait for it; how many these are."""
        held = [stream for stream in self._streams.values() if stream.held]
        for stream in held:
            del self._streams[stream.request_id]
            name = stream.request_id.rpartition(".")[0]
            request_id = _unique(name)
            self._streams[request_id] = stream
            stream.do_again(request_id)
        return len(held)

    def _forget(self, request_id: str) -> None:
        self._streams.pop(request_id, None)


def _unique(name: str) -> str:
    return f"{name}.{uuid.uuid4().hex[:12]}" if name else uuid.uuid4().hex
