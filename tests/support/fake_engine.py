"""An engine in a few lines: deterministic rows and replies, the real messages, in memory or behind a ROUTER."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import zmq

from dist_attn.wire.messages import (
    Accepted,
    AnyMessage,
    Cancel,
    Credit,
    EncodingDone,
    Failed,
    Generated,
    GetStatus,
    GuardCounts,
    OpenCompletion,
    OpenEncoding,
    OpenSession,
    Progress,
    RankStatus,
    Rows,
    RowSpec,
    SamplingSpec,
    Status,
    TokenLogprobs,
    Tokens,
    decode,
    encode,
)
from dist_attn.wire.session_messages import FinishDrawing, StateCredit, StatePiece
from dist_attn.wire.terms import Terms
from service.engine_port import EngineHealth, OpenStreams
from service.engine_stream import EngineStream, StreamLimits
from service.errors import Code, EngineUnavailable
from service.session_stream import SessionStream, SessionWork
from tests.support.fake_sessions import MANIFEST, FakeSessions

HIDDEN = 8
VOCAB = 257
Reply = Callable[[list[int], SamplingSpec], list[int]]


def echo(prompt: list[int], sampling: SamplingSpec) -> list[int]:
    """The prompt over and over, as long as asked."""
    return [prompt[i % len(prompt)] for i in range(sampling.max_tokens)]


def say(*pieces: bytes) -> Reply:
    """Always these bytes, one token per byte of the byte tokeniser, then the end."""
    return lambda prompt, sampling: list(b"".join(pieces))


def row_vector(tokens: npt.NDArray[np.int32], pooling: str) -> npt.NDArray[np.float32]:
    """The vector that this engine gives a row of tokens."""
    weight = np.arange(1, HIDDEN + 1, dtype=np.float32) / np.float32(7)
    number = np.float32(tokens[-1]) if pooling == "last" else np.float32(tokens.mean(dtype=np.float64))
    return (weight * number).astype(np.float32)


def told_of(tokens: list[int], sampling: SamplingSpec, by_token: bool = False) -> list[TokenLogprobs] | None:
    """The log-probabilities that this engine gives: the drawn token is the likeliest, the next ids follow.

    `by_token` makes larger ids likelier.
    """
    if sampling.logprobs is None:
        return None
    near = [[(token + k) % VOCAB for k in range(sampling.logprobs)] for token in tokens]
    own = [(token - VOCAB) / VOCAB if by_token else -0.5 for token in tokens]
    return [
        TokenLogprobs(value, ids, [value - k for k in range(len(ids))]) for value, ids in zip(own, near, strict=True)
    ]


@dataclass
class _Work:
    """One open request."""

    rows: RowSpec | None = None
    sampling: SamplingSpec | None = None
    progress: bool = False
    tokens: npt.NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))  # not in a row yet
    seen: int = 0
    emitted: int = 0
    row: int = 0
    granted: int = 0


@dataclass
class FakeEngine:
    """Takes the API's messages, gives the controller's. Its knobs are plain fields that a test may turn.

    While `paused`, messages wait. `fail_at` fails a request once it has so many tokens, `refuse` is the code that new
    requests are refused with, `mute` answers nothing to them, `mute_status` gives
    no status, `hold_replies` takes a prompt and never answers, `stingy` gives no credit after the first.
    `draw_seconds` is the time between two draws, in memory only. With `told_by_token` larger ids are likelier.
    """

    credit: int = 4096
    reply: Reply = echo
    tokens_per_message: int = 1
    ready: bool = True
    reason: str = ""
    fail_at: int | None = None
    refuse: str | None = None
    retry_after_s: int | None = None
    paused: bool = False
    mute: bool = False
    mute_status: bool = False
    hold_replies: bool = False
    stingy: bool = False
    draw_seconds: float = 0.0
    hidden_size: int = HIDDEN
    told_by_token: bool = False
    cancelled: list[str] = field(default_factory=list)
    received: list[AnyMessage] = field(default_factory=list)
    keep: bool = True
    sessions: FakeSessions = field(default_factory=FakeSessions)
    _work: dict[str, _Work] = field(default_factory=dict)

    @property
    def open_count(self) -> int:
        """Requests that are neither done nor cancelled."""
        return len(self._work) + len(self.sessions)

    @property
    def open_ids(self) -> list[str]:
        """Their ids."""
        return list(self._work)

    def handle(self, message: AnyMessage) -> list[AnyMessage]:
        """The answers to one message."""
        if self.keep:
            self.received.append(message)
        match message:
            case GetStatus():
                return [] if self.mute_status else [self.status()]
            case OpenEncoding(request_id=name, rows=rows):
                return self._open(name, _Work(rows=rows))
            case OpenCompletion(request_id=name, sampling=sampling, terms=terms):
                return self._open(name, _Work(sampling=sampling, progress=terms.progress))
            case OpenSession() if not self.mute:
                if self.refuse is not None:
                    return [Failed(request_id=message.request_id, code=self.refuse, message="refused by the test")]
                return self.sessions.open(message)
            case Cancel(request_id=name):
                self.sessions.cancel(name)
                self._work.pop(name, None)
                self.cancelled.append(name)
                return []
            case Tokens() if message.request_id not in self.sessions:
                return self._tokens(message)
        if getattr(message, "request_id", None) in self.sessions:
            return self.sessions.handle(message)
        if isinstance(message, OpenSession | StatePiece | StateCredit | FinishDrawing):
            return []  # of a session that has ended, or that a mute engine does not know
        raise TypeError(f"the API never sends {message!r}")

    def status(self) -> Status:
        """What the engine is doing."""
        return Status(
            ready=self.ready,
            reason=self.reason,
            model="fake",
            hidden_size=self.hidden_size,
            vocab_size=VOCAB,
            backend="fake",
            epoch=1,
            step=1,
            queued=0,
            active=len(self._work),
            tokens_per_second=0.0,
            ranks=[RankStatus(rank=0, pid=1, phase="idle", step_done=0, heartbeat_age=0.0, progress_age=0.0)],
            guards=GuardCounts(600, [[3, 0], [], [1, 50]]),
            lost_groups=2,
            replayed_tokens=700,
            manifest=MANIFEST,
        )

    def _open(self, name: str, work: _Work) -> list[AnyMessage]:
        if self.mute:
            return []
        if self.refuse is not None:
            return [Failed(name, self.refuse, "refused by the test", self.retry_after_s)]
        self._work[name] = work
        work.granted = self.credit
        return [Accepted(request_id=name), Credit(request_id=name, upto=self.credit)]

    def _tokens(self, message: Tokens) -> list[AnyMessage]:
        work = self._work.get(message.request_id)
        if work is None:
            return []
        new = np.frombuffer(message.tokens, dtype="<i4")
        if message.start != work.seen or work.seen + len(new) > work.granted:
            return [Failed(request_id=message.request_id, code="engine_failed", message="out of order")]
        work.tokens = np.concatenate([work.tokens, new])
        work.seen += len(new)
        if self.fail_at is not None and work.seen >= self.fail_at:
            del self._work[message.request_id]
            return [Failed(request_id=message.request_id, code="engine_failed", message="rank 1 died")]
        answers: list[AnyMessage] = []
        if not self.stingy:
            work.granted = work.seen + self.credit
            answers.append(Credit(request_id=message.request_id, upto=work.granted))
        if work.progress:
            answers.append(Progress(message.request_id, work.seen))
        if work.rows is not None:
            answers += self._rows(message.request_id, work, work.rows, message.final)
        elif message.final and work.sampling is not None and not self.hold_replies:
            answers += self._generate(message.request_id, work, work.sampling)
        return answers

    def _rows(self, name: str, work: _Work, spec: RowSpec, final: bool) -> list[AnyMessage]:
        every = {"token": 1, "window": spec.window}.get(spec.granularity, 1 << 60)
        starts, stops, vectors, used = [], [], [], 0
        while len(work.tokens) - used >= every or (final and used < len(work.tokens)):
            part = work.tokens[used : used + every]
            starts.append(work.emitted + used)
            used += len(part)
            stops.append(work.emitted + used)
            vectors.append(row_vector(part, spec.pooling))
        work.tokens = work.tokens[used:]
        work.emitted += used
        answers: list[AnyMessage] = []
        if starts:
            data = np.stack(vectors).astype("<f4").tobytes()
            answers.append(Rows(request_id=name, first_row=work.row, starts=starts, stops=stops, vectors=data))
            work.row += len(starts)
        if final:
            del self._work[name]
            answers.append(EncodingDone(request_id=name, tokens=work.seen, rows=work.row))
        return answers

    def _generate(self, name: str, work: _Work, sampling: SamplingSpec) -> list[AnyMessage]:
        wanted = self.reply(work.tokens.tolist(), sampling)
        drawn = wanted[: sampling.max_tokens]
        reason = "length" if len(drawn) == sampling.max_tokens else "stop"
        if reason == "stop":
            drawn = [*drawn, VOCAB - 1]
        del self._work[name]
        step = self.tokens_per_message
        cuts = [drawn[i : i + step] for i in range(0, len(drawn), step)]
        return [
            Generated(name, cut, reason if i == len(cuts) - 1 else None, told_of(cut, sampling, self.told_by_token))
            for i, cut in enumerate(cuts)
        ]


class FakeEnginePort:
    """The engine in the service's own event loop."""

    def __init__(self, engine: FakeEngine, limits: StreamLimits | None = None) -> None:
        self.engine = engine
        self._streams = OpenStreams(limits or StreamLimits())
        self.waiting: deque[AnyMessage] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def start(self) -> None:
        """Remember the loop that answers are delivered in."""
        self._loop = asyncio.get_running_loop()

    async def close(self) -> None:
        """Fail what is open."""
        self._streams.fail_all("the service is stopping", Code.STOPPING)
        self._loop = None

    def health(self) -> EngineHealth:
        """The fake's knobs."""
        return EngineHealth(self.engine.ready, self.engine.reason, self.engine.status())

    def open(self, work: RowSpec | SamplingSpec, name: str = "", terms: Terms | None = None) -> EngineStream:
        """Start a request."""
        if self._loop is None:
            raise EngineUnavailable("the port is closed", code=Code.ENGINE_UNREACHABLE)
        return self._streams.open(work, self._post, name, terms)

    def open_session(self, work: SessionWork, name: str = "") -> SessionStream:
        """Go on with a session."""
        if self._loop is None:
            raise EngineUnavailable("the port is closed", code=Code.ENGINE_UNREACHABLE)
        return self._streams.open_session(work, self._post, name)

    def resume(self) -> None:
        """Handle what waited while the engine was paused; callable from any thread."""
        self.engine.paused = False
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._drain)

    def inject(self, message: AnyMessage) -> None:
        """Deliver a message that the engine did not mean to send; callable from any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._streams.route, message)

    def _post(self, message: AnyMessage) -> None:
        decoded = decode(encode(message))
        if self.engine.paused and not isinstance(decoded, Cancel):
            self.waiting.append(decoded)
        else:
            self._answer(decoded)

    def _drain(self) -> None:
        while self.waiting:
            self._answer(self.waiting.popleft())

    def _answer(self, message: AnyMessage) -> None:
        draws = 0
        for answer in self.engine.handle(message):
            draws += isinstance(answer, Generated)
            if self._loop is not None:
                self._loop.call_later(draws * self.engine.draw_seconds, self._streams.route, answer)


@contextmanager
def fake_controller(engine: FakeEngine, address: str) -> Iterator[str]:
    """The engine behind a ROUTER socket in a thread; yields the address it is bound to."""
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.bind(address)
    bound = socket.getsockopt_string(zmq.LAST_ENDPOINT)
    stop = threading.Event()

    def run() -> None:
        waiting: deque[tuple[bytes, AnyMessage]] = deque()
        while not stop.is_set():
            if socket.poll(20):
                peer, data = socket.recv_multipart()
                waiting.append((peer, decode(data)))
            while waiting and (not engine.paused or isinstance(waiting[0][1], Cancel | GetStatus)):
                peer, message = waiting.popleft()
                for answer in engine.handle(message):
                    socket.send_multipart([peer, encode(answer)])
        socket.close()
        context.term()

    thread = threading.Thread(target=run, name="fake-controller")
    thread.start()
    try:
        yield bound
    finally:
        stop.set()
        thread.join(10)
