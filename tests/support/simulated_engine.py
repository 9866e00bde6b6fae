"""An engine in one thread: the real controller over fake ranks, and the API's side of what is asked of it."""

import hashlib
import random
from abc import ABC, abstractmethod
from collections import Counter, deque
from dataclasses import dataclass, field

import msgspec
import numpy as np

from dist_attn.control.controller import Controller
from dist_attn.control.settings import ControlSettings
from dist_attn.model_config.figures import GRAIN
from dist_attn.rank.worker import ReceivedStates, perform
from dist_attn.rank_link.heartbeat import Pulse
from dist_attn.rank_link.rank_settings import RankSettings
from dist_attn.wire.agent_messages import AgentHello, GroupExited, KillGroup, StartGroup
from dist_attn.wire.messages import (
    PROTOCOL_VERSION,
    BeginState,
    Checkpoint,
    Credit,
    Done,
    Failed,
    FinishDrawing,
    Generated,
    Restored,
    Rows,
    SamplingSpec,
    TokenLogprobs,
    Tokens,
)
from dist_attn.wire.rank_messages import DecodeOp, Draws, RankFailed, RankHello, StatePart, Step
from dist_attn.wire.snapshot import largest_snapshot
from dist_attn.wire.sockets import Sent, rank_identity
from tests.support.fake_rank import DIE, FakeExecutor, fake_manifest, fake_snapshot
from tests.support.states import MemoryStates

RANKS = 2
SETTINGS = ControlSettings(
    api_address="ipc:///none",
    model="m",
    ranks=RANKS,
    save_tokens=512,
    save_draws=3,
    crashes_to_open=1000,
    stall_limit_s=1e6,  # time passes in leaps here, and nobody sends heartbeats
    heartbeat_deadline_s=1e6,
)
API = b"api"
GRID = RANKS * (SETTINGS.chunk_tokens or GRAIN)
MANIFEST = fake_manifest(GRID, RANKS)


class _Died(Exception):
    pass


class _Mortal(FakeExecutor):
    """A fake rank that dies of a token as a process would."""

    fatal = (*FakeExecutor.fatal, _Died)

    def _misbehave(self, tokens):
        if DIE in tokens:
            raise _Died


class Engine:
    """A controller, an agent and ranks in one thread: what happens next is up to the test."""

    pauses = 4  # of a block, in which further rounds of decoding may be planned

    def __init__(self, settings=SETTINGS):
        self.settings, self.states, self.now, self.epoch = settings, MemoryStates(), 1.0, 0
        self.inboxes, self.outboxes, self.ranks, self.received, self.epochs = {}, {}, {}, [], []
        self.sent = []  # steps
        self.rounds = Counter()  # by step: rounds of decoding that were heard of before its end
        self.controller = Controller(settings, self.to_api, self.to_engine, self.states)
        self.engine(b"agent", AgentHello(PROTOCOL_VERSION, 5, "h", "127.0.0.1"))

    # ---- what the controller sends

    def to_api(self, peer, message):
        self.received.append(message)
        return Sent.DONE

    def to_engine(self, identity, message):
        if isinstance(message, StartGroup):
            self._start(message.epoch)
        elif isinstance(message, KillGroup):
            self.ranks = {}
            self.epochs.append(message.epoch)
        elif isinstance(message, Step | StatePart):
            if message.epoch != self.epoch or not self.ranks:
                return Sent.GONE
            self.inboxes[int(identity.decode()[-1])].append(message)
            self.sent += [message] if isinstance(message, Step) else []
        return Sent.DONE

    def _start(self, epoch):
        self.epoch = epoch
        self.inboxes = {rank: [] for rank in range(self.settings.ranks)}
        self.outboxes = {rank: deque() for rank in range(self.settings.ranks)}
        self.ranks = {rank: self.make_rank(epoch, rank) for rank in range(self.settings.ranks)}
        self.coming = {
            rank: ReceivedStates(
                largest_snapshot(self.settings.state_bytes if it.token_bytes else it.state_bytes, it.vocab_size)
            )
            for rank, it in ((rank, made.loaded) for rank, made in self.ranks.items())
        }
        self.hello = True

    def make_rank(self, epoch, rank):
        """What computes on a rank of this epoch."""
        settings = RankSettings(controller="ipc:///x", epoch=epoch, ranks=self.settings.ranks, rank=rank, model="m")
        return _Mortal(settings, Pulse())

    # ---- what happens

    def engine(self, identity, message):
        self.controller.on_engine(identity, message, self.now)

    def api(self, message):
        self.controller.on_api(API, message, self.now)

    def turn(self):
        """A moment passes: fresh ranks say hello, killed groups are reported, new steps go out."""
        self.now += 1.0
        self.engine(b"agent", AgentHello(PROTOCOL_VERSION, 5, "h", "127.0.0.1"))
        for epoch in self.epochs:
            self.engine(b"agent", GroupExited(epoch, -9, ""))
        self.epochs.clear()
        self.states.take_results()
        self.controller.tick(self.now)
        if self.ranks and self.hello:
            self.hello = False
            for rank in self.ranks:
                self.engine(rank_identity(self.epoch, rank), self.hello_of(rank))
            self.controller.tick(self.now)

    def hello_of(self, rank):
        """What the rank says first."""
        model = msgspec.structs.replace(self.ranks[rank].loaded, name="m", pauses=self.pauses)
        return RankHello(PROTOCOL_VERSION, self.epoch, rank, len(self.ranks), 70 + rank, model)

    def work(self, rank, heard=1000):
        """The rank takes what it was sent first, and so many of its messages are heard; false when there is nothing."""
        if rank not in self.ranks:
            return False
        if self.outboxes[rank]:
            return self._hear(rank, heard)
        if not self.inboxes[rank]:
            return False
        message = self.inboxes[rank].pop(0)
        if isinstance(message, StatePart):
            self.coming[rank].add(message)
            return True
        outbox = self.outboxes[rank]
        try:
            done = perform(message, rank, self.ranks[rank], Pulse(), self.coming[rank], outbox.append)
        except _Died:
            self.kill(rank)
            return True
        # Decoding takes so little of a step's time that further rounds of it are planned.
        decodes = any(isinstance(op, DecodeOp) for op in message.ops)
        outbox.append(msgspec.structs.replace(done, seconds=1.0, decode_seconds=0.1 * decodes))
        return self._hear(rank, heard)

    def work_off(self):
        """Every rank takes all that it was sent."""
        for rank in range(self.settings.ranks):
            while self.work(rank):
                pass

    def _hear(self, rank, most):
        outbox = self.outboxes[rank]
        for _ in range(min(most, len(outbox))):
            if isinstance(outbox[0], Draws):
                self.rounds[outbox[0].k] += 1
            self.engine(rank_identity(self.epoch, rank), outbox.popleft())
        return True

    def kill(self, rank):
        """The rank is lost, and with it its group."""
        if self.ranks:
            self.engine(rank_identity(self.epoch, rank), RankFailed(self.epoch, rank, 0, "gone"))
            self.now += 1.0
            self.controller.tick(self.now)

    def to_the_end(self, requests, until=4000):
        """Work on until every request has ended."""
        for _ in range(until):
            if all(self.ended(name) for name in requests):
                return
            self.turn()
            self.work_off()
        raise AssertionError(f"not ended: {[name for name in requests if not self.ended(name)]}")

    def ended(self, name):
        """Whether the request has its last message."""
        return any(
            isinstance(m, Done | Failed) or (isinstance(m, Generated) and m.finish_reason is not None)
            for m in self.of(name)
        )

    def of(self, name):
        """All that was sent for a request."""
        return [m for m in self.received if getattr(m, "request_id", None) == name]

    def rows(self, name, width=4):
        """Starts of rows and their vectors."""
        rows = [m for m in self.of(name) if isinstance(m, Rows)]
        starts = [start for m in rows for start in m.starts]
        vectors = [np.frombuffer(m.vectors, "<f4").reshape(-1, width) for m in rows]
        return starts, np.concatenate([np.empty((0, width), "<f4"), *vectors])

    def tokens(self, name):
        """The tokens that were drawn."""
        return [token for m in self.of(name) if isinstance(m, Generated) for token in m.tokens]


@dataclass
class Asker(ABC):
    """The API's side of one request that begins with a state or hands some out: it answers what it is sent."""

    engine: Engine
    name: str
    tokens: np.ndarray  # that follow the state
    begin: int = 0
    draws: int = 0
    stored: bytes | None = None
    last: int = 11  # the last token in the state to begin with
    finish: int | None = None  # how many drawn tokens it wants after all
    position: int = 0
    heard: int = 0
    drawn: list[int] = field(default_factory=list)
    told: list[TokenLogprobs] = field(default_factory=list)
    reason: str | None = None
    restored: list[Restored] = field(default_factory=list)
    states: dict[int, bytes] = field(default_factory=dict)
    unstored: list[Checkpoint] = field(default_factory=list)
    done: Done | None = None
    failed: Failed | None = None

    @abstractmethod
    def opening(self, begin, sampling):
        """The message that opens it."""

    @property
    @abstractmethod
    def ended(self):
        """Whether nothing more will come."""

    def open(self):
        """Ask for it."""
        if self.stored is None:
            self.stored = fake_snapshot(self.begin, self.last, MANIFEST) if self.begin else b""
        self.position = self.begin
        begin = BeginState(self.begin, *self.engine.states.stored(self.stored)) if self.begin else None
        self.engine.api(self.opening(begin, SamplingSpec(self.draws, temperature=0.0) if self.draws else None))
        if not len(self.tokens):
            self.engine.api(Tokens(self.name, self.begin, b"", True))
        return self

    def listen(self):
        """Answer what has come since."""
        messages = self.engine.received
        while self.heard < len(messages):
            message = messages[self.heard]
            self.heard += 1
            if getattr(message, "request_id", None) == self.name:
                self._answer(message)

    def _answer(self, message):
        assert not self.ended, "nothing follows the end"
        match message:
            case Restored():
                self.restored.append(message)
            case Credit(upto=upto):
                self._send(min(upto, self.begin + len(self.tokens)))
            case Generated(tokens=tokens, finish_reason=reason, logprobs=logprobs):
                assert self.reason is None, "drawn after the end"
                self.drawn += tokens
                self.told += logprobs or []
                self.reason = reason
                if self.finish is not None and len(self.drawn) == self.finish + 2:
                    self.engine.api(FinishDrawing(self.name, self.finish))
            case Checkpoint() if message.error:
                self.unstored.append(message)
            case Checkpoint(position=position, blob=blob):
                assert position not in self.states, "handed out twice"
                data = self.states[position] = self.engine.states.blobs[blob]
                assert (message.digest, message.num_bytes) == (hashlib.sha256(data).hexdigest(), len(data))
            case Done():
                self.done = message
            case Failed():
                self.failed = message

    def _send(self, stop):
        if stop > self.position:
            data = self.tokens[self.position - self.begin : stop - self.begin].astype("<i4").tobytes()
            start, self.position = self.position, stop
            self.engine.api(Tokens(self.name, start, data, stop == self.begin + len(self.tokens)))


def disturb(engine, chance, moments, askers=()):
    """Let the engine and those that ask work for a while, and kill up to three ranks between any two messages."""
    kills = 3
    for _ in range(chance.randrange(moments)):
        action = chance.randrange(20)
        if action == 0 and kills:
            kills -= 1
            engine.kill(chance.randrange(RANKS))
        elif action < 5:
            engine.turn()
        elif action < 9 and askers:
            chance.choice(askers).listen()
        else:
            engine.work(chance.randrange(RANKS), heard=chance.randrange(1, 6))


def run_to_the_end(engine, askers, turns=3000):
    """Work on until everything that was asked for has ended."""
    for _ in range(turns):
        for asker in askers:
            asker.listen()
        if all(asker.ended for asker in askers):
            return
        engine.turn()
        engine.work_off()
    raise AssertionError(f"not ended: {[asker for asker in askers if not asker.ended]}")


def run_through_losses(asker, seed, turns=3000):
    """Work on until it has ended, and lose the only rank thrice at moments that the seed chooses."""
    engine, chance, kills = asker.engine, random.Random(seed), 3
    for _ in range(turns):
        asker.listen()
        if asker.ended:
            return
        engine.turn()
        if kills and chance.random() < 0.2:
            kills -= 1
            engine.kill(0)
        elif kills:
            engine.work(0)
        else:
            engine.work_off()
    raise AssertionError(f"not ended: {asker}")


def nothing_is_left(engine):
    """No bytes in the keeper, no request on a rank."""
    for _ in range(3):
        engine.turn()
        engine.work_off()
    states = engine.states
    assert not (states.kept or states.unfinished or states.finished or states.held or states.beginnings)
    assert engine.controller.idle and not any(executor.position for executor in engine.ranks.values())
