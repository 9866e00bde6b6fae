"""The requests in flight: each under its own id, fed with its messages, given to another controller if need be."""

import dataclasses
import secrets
import time
import uuid
from collections.abc import Callable

import msgspec

from dist_attn.wire.messages import (
    Accepted,
    AnyMessage,
    Credit,
    EncodingDone,
    Failed,
    Generated,
    OpenEncoding,
    Progress,
    Rows,
    RowSpec,
)
from dist_attn.wire.session_messages import Checkpoint, Restored, SessionDone, StateCredit, StatePiece, StatesDone
from dist_attn.wire.terms import Terms
from dist_attn_service.base.errors import Code, EngineFailure
from dist_attn_service.base.tracing import engine_trace
from dist_attn_service.engine.completion_stream import CompletionStream, CompletionWork
from dist_attn_service.engine.resending import GivenMemory
from dist_attn_service.engine.session_stream import SessionStream, SessionWork
from dist_attn_service.engine.stream import EngineStream, StreamLimits

__all__ = ["OpenStreams"]

_OF_REQUESTS = (
    *(Accepted, Credit, Rows, EncodingDone, Generated, Progress, Failed),
    *(Restored, StateCredit, StatePiece, Checkpoint, SessionDone, StatesDone),
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

    def open(
        self, work: RowSpec, post: Callable[[AnyMessage], None], name: str = "", terms: Terms | None = None
    ) -> EngineStream:
        """A new stream whose opening message has been posted."""
        request_id = _unique(name)
        stream = EngineStream(request_id, post, self._forget, self._limits)
        self._begin(stream, "encoding")
        left = _Left(terms or Terms())
        stream.keep_for_another(lambda name: OpenEncoding(name, work, left.now()), self._memory)
        post(OpenEncoding(request_id, work, left.terms))
        return stream

    def open_completion(
        self, work: CompletionWork, post: Callable[[AnyMessage], None], name: str = "", terms: Terms | None = None
    ) -> CompletionStream:
        """The same for a completion."""
        request_id = _unique(name)
        if work.sampling.seed is None:
            # settled here, so that another controller draws the same tokens
            sampling = msgspec.structs.replace(work.sampling, seed=secrets.randbits(63))
            work = dataclasses.replace(work, sampling=sampling)
        stream = CompletionStream(request_id, post, self._forget, self._limits, work)
        self._begin(stream, "completion")
        left = _Left(terms or Terms())
        without_states = CompletionWork(work.sampling)
        stream.keep_for_another(lambda name: without_states.message(name, left.now()), self._memory)
        post(work.message(request_id, left.terms))
        return stream

    def open_session(self, work: SessionWork, post: Callable[[AnyMessage], None], name: str = "") -> SessionStream:
        """The same for a session."""
        request_id = _unique(name)
        stream = SessionStream(request_id, post, self._forget, self._limits, work)
        self._begin(stream, "session")
        post(work.message(request_id))
        return stream

    def _begin(self, stream: EngineStream, work: str) -> None:
        self._streams[stream.request_id] = stream
        stream.trace = engine_trace(work)
        stream.trace.moved(self._epoch, self._step)

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


class _Left:
    """The terms of a request as they are later: its deadline counts from when it came first."""

    def __init__(self, terms: Terms) -> None:
        self.terms = terms
        self._since = time.monotonic()

    def now(self) -> Terms:
        """With what is left of the deadline."""
        if self.terms.deadline_s is None:
            return self.terms
        left = max(0.001, self.terms.deadline_s - (time.monotonic() - self._since))
        return msgspec.structs.replace(self.terms, deadline_s=left)


def _unique(name: str) -> str:
    return f"{name}.{uuid.uuid4().hex[:12]}" if name else uuid.uuid4().hex
