"""An engine in a few lines: deterministic rows and replies, the real messages, in memory or behind a ROUTER."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import zmq
from dist_attn_service.base.errors import Code, EngineUnavailable
from dist_attn_service.engine.port import DeleteBlob, EngineHealth, EngineKind, OpenStreams
from dist_attn_service.engine.resending import GivenMemory
from dist_attn_service.engine.stream import EngineStream, StreamLimits

from dist_attn.wire.manifest import Manifest
from dist_attn.wire.messages import (
    Accepted,
    AnyMessage,
    Cancel,
    Credit,
    Done,
    Failed,
    FinishDrawing,
    Generated,
    GetStatus,
    OpenWork,
    Progress,
    RankStatus,
    Rows,
    SamplingSpec,
    Status,
    TokenLogprobs,
    Tokens,
    decode,
    encode,
)
from dist_attn.wire.rank_messages import GuardCounts
from tests.support.fake_prompts import FakePrompts
from tests.support.fake_rows import HIDDEN, RowMaker, row_vector
from tests.support.fake_sessions import MANIFEST, SESSION_CREDIT, FakeSessions
from tests.support.fake_store import FakeStore

__all__ = [
    "HIDDEN",
    "VOCAB",
    "FakeEngine",
    "FakeEnginePort",
    "Reply",
    "echo",
    "fake_controller",
    "row_vector",
    "say",
    "told_of",
]

VOCAB = 257
Reply = Callable[[list[int], SamplingSpec], list[int]]


def echo(prompt: list[int], sampling: SamplingSpec) -> list[int]:
    """The prompt over and over, as long as asked."""
    return [prompt[i % len(prompt)] for i in range(sampling.max_tokens)]


def say(*pieces: bytes) -> Reply:
    """Always these bytes, one token per byte of the byte tokeniser, then the end."""
    return lambda prompt, sampling: list(b"".join(pieces))


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


def scores_of(name: str, tokens: list[int], count: int) -> list[AnyMessage]:
    """The scores of a prompt's tokens but the first, as `told_of` tells them, in two messages."""
    told = told_of(tokens[1:], SamplingSpec(1, logprobs=count)) or []
    values = [[one.drawn, *one.top_tokens, *one.top_logprobs] for one in told]
    cuts = [(0, len(told) // 2), (len(told) // 2, len(told))]
    return [
        Rows(name, a, list(range(a, b)), list(range(a + 1, b + 1)), np.array(values[a:b], dtype="<f4").tobytes())
        for a, b in cuts
        if a < b
    ]


@dataclass
class _Work:
    """One open request."""

    rows: RowMaker | None = None
    sampling: SamplingSpec | None = None
    progress: bool = False
    tokens: npt.NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))  # of a prompt
    seen: int = 0
    granted: int = 0
    states_at: tuple[int, ...] = ()


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
    vocab_size: int = VOCAB
    told_by_token: bool = False
    cancelled: list[str] = field(default_factory=list)
    received: list[AnyMessage] = field(default_factory=list)
    keep: bool = True
    manifest: Manifest | None = MANIFEST
    place: str = ""
    sessions: FakeSessions = field(default_factory=FakeSessions)
    prompts: FakePrompts = field(default_factory=FakePrompts)
    store: FakeStore = field(default_factory=FakeStore)
    _work: dict[str, _Work] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.sessions.store = self.prompts.store = self.store

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
            case OpenWork(kind="encoding", request_id=name, rows=rows) if rows is not None:
                return self._open(name, _Work(rows=RowMaker(name, rows)))
            case OpenWork(kind="completion", request_id=name, draw=sampling, terms=terms):
                work = _Work(sampling=sampling, progress=terms.progress, states_at=message.keep.at)
                answers = self._open(name, work)
                if message.begin is not None and name in self._work:
                    return [answers[0], *self._begin(message)]
                return answers
            case OpenWork(kind="session") if not self.mute:
                if self.refuse is not None:
                    return [Failed(request_id=message.request_id, code=self.refuse, message="refused by the test")]
                return self.sessions.open(message, self.credit if message.rows else SESSION_CREDIT)
            case Cancel(request_id=name):
                self.sessions.cancel(name)
                self._work.pop(name, None)
                self.cancelled.append(name)
                return []
            case Tokens() if message.request_id not in self.sessions:
                return self._tokens(message)
        if getattr(message, "request_id", None) in self.sessions:
            return self.sessions.handle(message, stingy=self.stingy, fail_at=self.fail_at)
        if isinstance(message, OpenWork | FinishDrawing):
            return []  # of a session that has ended, or that a mute engine does not know
        raise TypeError(f"the API never sends {message!r}")

    def status(self) -> Status:
        """What the engine is doing."""
        return Status(
            ready=self.ready,
            reason=self.reason,
            model="fake",
            hidden_size=self.hidden_size,
            vocab_size=self.vocab_size,
            backend="fake",
            epoch=1,
            step=1,
            queued=0,
            active=len(self._work),
            tokens_per_second=0.0,
            ranks=[RankStatus(rank=0, pid=1, phase="idle", step_done=0, heartbeat_age=0.0, progress_age=0.0, busy=1.5)],
            guards=GuardCounts(600, [[3, 0], [], [1, 50]]),
            lost_groups=2,
            replayed_tokens=700,
            manifest=self.manifest,
            store=self.place,
        )

    def _open(self, name: str, work: _Work) -> list[AnyMessage]:
        if self.mute:
            return []
        if self.refuse is not None:
            return [Failed(name, self.refuse, "refused by the test", self.retry_after_s)]
        self._work[name] = work
        work.granted = self.credit
        return [Accepted(request_id=name), Credit(request_id=name, upto=self.credit)]

    def _begin(self, message: OpenWork) -> list[AnyMessage]:
        """A completion goes on from a stored state, or fails."""
        name = message.request_id
        tokens, answers = self.prompts.begin(message)
        if tokens is not None:
            work = self._work[name]
            work.tokens, work.seen = tokens, len(tokens)
            work.granted = work.seen + self.credit
            return [*answers, Credit(name, work.granted)]
        if answers:
            del self._work[name]
        return answers

    def _tokens(self, message: Tokens) -> list[AnyMessage]:
        work = self._work.get(message.request_id)
        if work is None:
            return []
        new = np.frombuffer(message.tokens, dtype="<i4")
        if message.start != work.seen or work.seen + len(new) > work.granted:
            return [Failed(request_id=message.request_id, code="engine_failed", message="out of order")]
        if work.rows is None:
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
            answers += work.rows.push(new, message.final)
            if message.final:
                del self._work[message.request_id]
                answers.append(Done(message.request_id, work.seen, 0, work.rows.rows))
        elif message.final and work.sampling is not None and not self.hold_replies:
            answers += self.prompts.kept(message.request_id, work.tokens, work.states_at)
            answers += self._generate(message.request_id, work, work.sampling)
            if work.states_at:
                answers.append(Done(message.request_id, 0, 0, 0))
        return answers

    def _generate(self, name: str, work: _Work, sampling: SamplingSpec) -> list[AnyMessage]:
        wanted = self.reply(work.tokens.tolist(), sampling)
        drawn = wanted[: sampling.max_tokens]
        reason = "length" if len(drawn) == sampling.max_tokens else "stop"
        asked = sampling.prompt_logprobs
        if reason == "stop" and asked is None:
            drawn = [*drawn, VOCAB - 1]
        del self._work[name]
        step = self.tokens_per_message
        cuts = [drawn[i : i + step] for i in range(0, len(drawn), step)] or [[]]
        last = Generated(name, cuts[-1], reason, told_of(cuts[-1], sampling, self.told_by_token))
        if reason == "stop" and asked is not None:
            end = Generated(name, [], "stop", told_of([VOCAB - 1], sampling), VOCAB - 1)
            return [*scores_of(name, work.tokens.tolist(), asked), *self._draws(name, cuts, sampling), end]
        scores = [] if asked is None else scores_of(name, work.tokens.tolist(), asked)
        return [*scores, *self._draws(name, cuts[:-1], sampling), last]

    def _draws(self, name: str, cuts: list[list[int]], sampling: SamplingSpec) -> list[AnyMessage]:
        return [Generated(name, cut, None, told_of(cut, sampling, self.told_by_token)) for cut in cuts]


class FakeEnginePort:
    """The engine in the service's own event loop."""

    def __init__(
        self, engine: FakeEngine, limits: StreamLimits | None = None, memory: GivenMemory | None = None
    ) -> None:
        self.engine = engine
        self._streams = OpenStreams(limits or StreamLimits(), memory)
        self.waiting: deque[AnyMessage] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._due: dict[str, float] = {}  # when the latest answer of each request comes
        self._said: dict[str, deque[AnyMessage]] = {}  # of each request, what has not come yet

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

    def engines(self) -> dict[str, EngineHealth]:
        """No others."""
        return {}

    def kind(self, like: Manifest | None = None) -> EngineKind | None:
        """As the real one."""
        return EngineKind.of(self.engine.status())

    def open(self, work: OpenWork, like: Manifest | None = None, only: EngineKind | None = None) -> EngineStream:
        """Start it."""
        if self._loop is None:
            raise EngineUnavailable("the port is closed", code=Code.ENGINE_UNREACHABLE)
        return self._streams.open(work, self._post)

    def discard_with(self, delete_blob: DeleteBlob) -> None:
        """As the real one."""
        self._streams.delete_blob = delete_blob

    def tasks(self, name: str) -> int:
        """How many tasks of this name the service's loop has; callable from any thread."""
        return 0 if self._loop is None else sum(task.get_name() == name for task in asyncio.all_tasks(self._loop))

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
        for answer in self.engine.handle(message):
            if self._loop is None:
                continue
            # In the order in which an engine says them: what follows a draw comes after it, whoever asked for it.
            name = getattr(answer, "request_id", "")
            due = max(self._loop.time(), self._due.get(name, 0.0))
            due += self.engine.draw_seconds if isinstance(answer, Generated) else 0.0
            self._due[name] = due
            # uvloop keeps no order among calls that are due within a millisecond: each takes whatever is next.
            self._said.setdefault(name, deque()).append(answer)
            self._loop.call_at(due, self._say, name)

    def _say(self, name: str) -> None:
        coming = self._said[name]
        answer = coming.popleft()
        if not coming:
            del self._said[name]
        self._streams.route(answer)


@contextmanager
def fake_controller(engine: FakeEngine, address: str) -> Iterator[str]:
    """The engine behind a ROUTER socket in a thread; yields the address it is bound to.

    Beside a socket's file its states are in the store of a service whose data folder is `data`.
    """
    if address.startswith("ipc://") and engine.store == FakeStore():
        engine.store.address = str(Path(address.removeprefix("ipc://")).parent / "data" / "states")
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
        thread.join(60)
