"""The controller's decisions: epochs, steps and requests come together here; no sockets, no clock, no torch."""

from dataclasses import replace

import structlog

from dist_attn.control.answers import Answers
from dist_attn.control.group import Phase, RankGroup
from dist_attn.control.intake import Intake
from dist_attn.control.open_requests import OpenRequests
from dist_attn.control.requests import Cutting, view_of
from dist_attn.control.scheduler import Limits, SchedulerView, Turns, plan
from dist_attn.control.settings import ControlSettings
from dist_attn.control.state_files import StateFiles
from dist_attn.control.states import States
from dist_attn.control.steps import Pace, StepBook
from dist_attn.errors import WireError
from dist_attn.wire.agent_messages import AgentHello, GroupExited, GroupStarted, RankExited, StopAgent
from dist_attn.wire.messages import AnyMessage, GetStatus, Status
from dist_attn.wire.rank_messages import (
    Draws,
    Faulted,
    GoOn,
    GuardCounts,
    Heartbeat,
    Ping,
    RankFailed,
    RankHello,
    Shutdown,
    StatePart,
    StepDone,
)
from dist_attn.wire.sockets import Send, Sent, beat_identity, rank_identity
from dist_attn_api.errors import Code

STOPPING = "the engine is stopping; send the request again later"
TEXTS_AT_ONCE = 64  # requests in a step of an encoder, which reads short texts together
LONG_ROUND_S = 0.1  # of decoding; to hand a step over takes some thousandths
AGENT_START_S = 60.0  # until its first hello: a process that was just started has its libraries to load
AGENT_STUCK_S = 10.0  # it says hello every second, but starting and killing ranks on a busy machine take a while
HELD_UP_S = 1.0  # a turn of the loop that took longer than this was not the ranks' fault

log = structlog.get_logger("dist_attn.control")


class Controller:
    """All open requests and the group of ranks that works on them."""

    def __init__(
        self, settings: ControlSettings, to_api: Send, to_engine: Send, state_files: StateFiles, engine: str = ""
    ) -> None:
        self._settings = settings
        self._engine = engine
        self._to_api, self._to_engine = to_api, to_engine
        self._limits = Limits(
            ranks=settings.ranks,
            block_tokens=settings.block_tokens,
            beside_decode_tokens=settings.beside_decode_tokens,
            short_tokens=settings.block_tokens,
            max_active=settings.max_active,
            state_bytes=settings.state_bytes,
            step_s=settings.step_s,
            weights_over_ranks=settings.weights_over_ranks and settings.ranks > 1,
        )
        self._turns = Turns()
        self._agents: set[bytes] = set()
        self._ticked_at = 0.0
        self._down_since = 0.0
        self._state_files = state_files
        self._requests = OpenRequests(settings, to_api, state_files)
        self._states = States(self._requests, settings, state_files)
        self._answers = Answers(self._requests, self._states, settings)
        self._pace = Pace()
        self._intake = Intake(self._requests, self._states, self._answers, settings, self._pace)
        self._group = RankGroup(settings, self, engine)
        self._steps = StepBook(settings.ranks, pace=self._pace, all_decode=self._limits.weights_over_ranks)
        self._guards = GuardCounts()
        self._met: dict[tuple[int, int], dict[int, Faulted]] = {}  # by step and request, of each rank that met it
        self._draining = False
        self._lost_groups = 0
        self._replayed_tokens = 0

    # ---- messages ------------------------------------------------------------------------------

    def on_api(self, peer: bytes, message: AnyMessage, now: float) -> None:
        """Take a message of an API process."""
        self._requests.now = now
        if isinstance(message, GetStatus):
            self._to_api(peer, self.status(now))
        else:
            self._intake.receive(peer, message)

    def on_unreadable(self, peer: bytes, error: WireError, now: float) -> None:
        """End the request that an unreadable message of an API process is about, where the message still names it."""
        self._requests.now = now
        if error.request_id:
            self._intake.refuse(peer, error.request_id, str(error))

    def on_engine(self, identity: bytes, message: AnyMessage, now: float) -> None:
        """Take a message of an agent or a rank; those of an older epoch are dropped."""
        self._requests.now = now
        group = self._group
        match message:
            case AgentHello():
                if group.agent_hello(identity, message, now):
                    self._agents.add(identity)
                    self._to_engine(identity, Ping())
            case GroupStarted():
                group.group_started(message)
            case GroupExited():
                group.group_exited(identity, message, now)
            case RankExited():
                group.rank_exited(message, now)
            case RankHello() | StatePart() | Draws() | Faulted() | StepDone() | RankFailed() if identity == self._rank(
                message.rank
            ):
                self._on_rank(message, now)
            case Heartbeat() if identity == beat_identity(group.epoch, message.rank, self._engine):
                group.heartbeat(message, now)
                self._to_engine(identity, Ping())
            case _:
                # Ranks of an older epoch get no answer, so they exit by themselves if no agent kills them.
                log.debug("message dropped", kind=type(message).__name__, identity=identity.hex())

    def _rank(self, rank: int) -> bytes:
        """The identity of a rank of the current epoch."""
        return rank_identity(self._group.epoch, rank, self._engine)

    def _on_rank(self, message: RankHello | StatePart | Draws | Faulted | StepDone | RankFailed, now: float) -> None:
        if message.epoch != self._group.epoch:
            return
        match message:
            case RankHello():
                self._group.rank_hello(message, now)
            case RankFailed():
                self._group.rank_failed(message, now)
            case StatePart() if self._requests.get(message.request) is not None:
                self._state_files.append(message.request, message.ordinal, message.start, message.data)
            case Draws() if self._group.running and message.rank in self._group.ranks:
                self._round_done(message, now)
            case Faulted() if self._group.running and message.rank in self._group.ranks:
                self._faulted(message, now)
            case StepDone() if self._group.running and message.rank in self._group.ranks:
                self._step_done(message, now)

    def _faulted(self, faulted: Faulted, now: float) -> None:
        """End a request at which all ranks have failed alike; where they have not, the group is lost with it."""
        place = (faulted.k, faulted.fault.request)
        met = self._met.setdefault(place, {})
        met[faulted.rank] = faulted
        if len({each.exchanges for each in met.values()}) > 1 or self._steps.any_finished(faulted.k):
            self._fail_alone(faulted, now)
        elif len(met) == self._settings.ranks:
            del self._met[place]
            self._answers.take_fault(faulted.fault)
            for rank in met:
                if self._to_engine(self._rank(rank), GoOn(self._group.epoch, *place)) is not Sent.DONE:
                    self._group.rank_unreachable(rank, now)

    def _fail_alone(self, faulted: Faulted, now: float) -> None:
        self._group.rank_failed(RankFailed(faulted.epoch, faulted.rank, faulted.k, faulted.fault.error), now)

    def _round_done(self, draws: Draws, now: float) -> None:
        try:
            self._steps.check_due(draws.rank, draws.k)
        except WireError as error:
            self._group.rank_confused(draws.rank, str(error), now)
        else:
            self._take_draws(draws)

    def _step_done(self, done: StepDone, now: float) -> None:
        try:
            reached = self._steps.finish(done)
            for pieces in done.pieces:
                self._answers.take_pieces(pieces)
        except WireError as error:
            self._group.rank_confused(done.rank, str(error), now)
            return
        if alone := next((met for (k, _), met in self._met.items() if k <= done.k), None):
            self._fail_alone(next(iter(alone.values())), now)
        for number, position in reached:
            self._answers.progress(number, position)
        if done.guards is not None:
            self._guards = self._guards.plus(done.guards)
        self._take_draws(done)
        for saved in done.saved:
            self._states.take_saved(saved)
        self._group.ranks[done.rank].finished(done.k, done.seconds, now)

    def _take_draws(self, message: Draws | StepDone) -> None:
        for drawn in message.drawn:
            self._answers.take_draw(drawn)
        for fault in message.faults:
            self._answers.take_fault(fault)
        if self._answers.came_further():
            self._group.was_of_use()

    # ---- time ----------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Act on time, and send the next steps if there is room for them."""
        if now - self._ticked_at > HELD_UP_S:
            self._group.forgive_silence(now)
        self._requests.now = self._ticked_at = now
        self._intake.tick()
        oldest = self._steps.oldest
        self._group.tick(now, oldest[0] if oldest else None, oldest[1] if oldest else 0)
        self._fail_the_unserved(now)
        self.advance(now)

    def advance(self, now: float) -> None:
        """Send steps until as many are under way as may be, or there is nothing to do."""
        self._requests.now = now
        # New work waits for all steps under way: a long step gains little from one that is there before it ends.
        most = 1 if self._pace.round_s > LONG_ROUND_S else self._settings.steps_in_flight
        while self._group.running and len(self._steps.under_way) < most:
            chosen = plan(self._view())
            self._turns = chosen.turns
            if chosen.empty and not self._requests.any_to_close and not self._states.any_awaited:
                return
            for rank, message in self._steps.compose(chosen, self._requests, self._states, now):
                if self._to_engine(self._rank(rank), message) is not Sent.DONE:
                    self._group.rank_unreachable(rank, now)

    @property
    def idle(self) -> bool:
        """Return whether no request is open."""
        return not len(self._requests)

    def _view(self) -> SchedulerView:
        model, requests = self._requests.model, self._requests
        cutting = Cutting(
            chunk=requests.chunk,
            hidden_size=model.hidden_size if model else 0,
            text_tokens=model.text_tokens if model else None,
            stay_tokens=self._states.save_tokens if model and model.state_bytes is not None else None,
        )
        views = (
            self._states.in_view(view_of(request, cutting, requests.blocked(request)), request) for request in requests
        )
        pace, pauses = self._pace, model.pauses if model else 0
        most = TEXTS_AT_ONCE if model and not model.writes else self._limits.max_requests
        limits = replace(self._limits, max_requests=most, token_s=pace.token_s, round_s=pace.round_s, pauses=pauses)
        return SchedulerView(limits, tuple(views), self._turns)

    def _fail_the_unserved(self, now: float) -> None:
        limit = self._settings.ready_deadline_s
        if self._group.running or now - self._down_since < limit:
            return
        for request in self._requests:
            if now - request.created_at >= limit:
                text = f"no ranks for {limit:g} s: {self._group.reason(now)}"
                self._requests.fail(request, Code.ENGINE_NOT_READY, text)

    # ---- what the group decides ----------------------------------------------------------------

    def to_agent(self, identity: bytes, message: AnyMessage) -> bool:
        """Send to an agent; false when it is gone."""
        return self._to_engine(identity, message) is not Sent.GONE

    def group_ready(self, hello: RankHello) -> None:
        """Begin the epoch of a new group whose ranks have all loaded the model."""
        self._steps.begin_epoch(hello.epoch)
        self._turns = Turns()
        self._intake.set_model(hello.model)

    def group_lost(self, reason: str) -> None:
        """Send what the lost ranks had begun back to its last saved state; the next group does it again."""
        self._down_since = self._requests.now
        self._steps.begin_epoch(self._group.epoch)
        for met in self._met.values():  # some ranks failed at a request: it would lose the next group as well
            self._answers.take_fault(next(iter(met.values())).fault)
        self._met.clear()
        self._turns = Turns()
        self._lost_groups += 1
        again = self._answers.rewind(reason)
        self._replayed_tokens += again
        log.info("requests go back", open=len(self._requests), tokens_again=again)

    # ---- state and end -------------------------------------------------------------------------

    def status(self, now: float) -> Status:
        """Return the state of the engine as `GetStatus` is answered."""
        model, group = self._requests.model, self._group
        active = sum(request.keeping.on_ranks or request.reading.dispatched > 0 for request in self._requests)
        return Status(
            ready=group.running and not self._draining,
            reason=STOPPING if self._draining else group.reason(now),
            model=model.name if model else self._settings.model,
            hidden_size=model.hidden_size if model else 0,
            vocab_size=model.vocab_size if model else 0,
            backend=(model.backend if model else "") or self._settings.backend,
            epoch=group.epoch,
            step=self._steps.last_k,
            queued=len(self._requests) - active,
            active=active,
            tokens_per_second=round(self._steps.tokens_per_second(now), 1),
            ranks=group.status(now),
            guards=self._guards if self._guards.denominators else None,
            lost_groups=self._lost_groups,
            replayed_tokens=self._replayed_tokens,
            manifest=model.manifest if model else None,
            store=self._state_files.place,
            state_bytes=model.state_bytes if model else None,
            token_bytes=model.token_bytes if model else 0,
        )

    def drain(self) -> None:
        """Take no new requests; open ones may finish."""
        self._draining = True
        self._intake.drain(STOPPING)

    def stop(self, now: float) -> None:
        """End the engine: open requests fail and the ranks finish; `stopped` tells when nothing of them is left."""
        self._requests.now = now
        self._group.stop()
        self._intake.stop(STOPPING)
        for rank in self._group.ranks:
            self._to_engine(self._rank(rank), Shutdown(self._group.epoch))

    @property
    def stopped(self) -> bool:
        """Return whether no ranks are left, or none that could be asked to finish."""
        return self._group.phase is Phase.IDLE or all(rank.exited for rank in self._group.ranks.values())

    def agent_is_stuck(self, identity: bytes, now: float, started_at: float) -> bool:
        """Return whether an agent is silent for too long; while the ranks just run, none is."""
        agent = self._group.hosts.known(identity)
        heard_at, patience_s = (agent.heard_at, AGENT_STUCK_S) if agent else (started_at, AGENT_START_S)
        return self._group.phase is not Phase.RUNNING and now - heard_at > patience_s

    def dismiss_agents(self) -> None:
        """Tell the agents to kill what may be left, and to exit."""
        for identity in self._agents:
            self._to_engine(identity, StopAgent())
