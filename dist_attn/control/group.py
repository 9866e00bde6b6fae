"""The life of the rank group: its epochs, which ranks are alive, why a group was lost, and when the next one starts.

No clock and no sockets: every method is told the time, and what it decides goes out through `Outlet`.

    idle --(agents here, back-off over)-> starting --(every rank said hello)--> running
      ^                                      |                                    |
      └──(nothing of the epoch is left)── clearing <──(a rank failed, died, fell silent, stuck)──┘
"""

import signal
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import structlog

from dist_attn.control.placement import Placement, unreachable
from dist_attn.control.settings import ControlSettings
from dist_attn.wire.agent_messages import AgentHello, GroupExited, GroupStarted, RankExited
from dist_attn.wire.messages import PROTOCOL_VERSION, AnyMessage, RankStatus
from dist_attn.wire.rank_messages import Heartbeat, LoadedModel, RankFailed, RankHello

PROBE_S = 0.5  # how often it is seen whether the agents can still be reached; gone twice means dead
EVIDENCE_S = 0.3  # after the first sign of a failure: who died shows a moment after who noticed it
CLEAR_DEADLINE_S = 10.0
START_SILENCE = 1 / 4  # of start_deadline_s: ranks beat while they load, but loading libraries may hold that up

log = structlog.get_logger("dist_attn.control")


class Phase(StrEnum):
    """The phases in the life of a rank group."""

    IDLE = "idle"
    STARTING = "starting"
    RUNNING = "running"
    CLEARING = "clearing"


@dataclass
class RankVitals:
    """One rank that has said hello. Times are monotonic seconds."""

    hello: RankHello
    heard_at: float
    progress_at: float = 0.0  # when it was last seen to move on
    progress: int = 0
    step_done: int = 0
    phase: str = "idle"
    peak_rss_bytes: int = 0
    busy_s: float = 0.0  # in the steps that it has finished, waiting for other ranks included
    failure: str = ""  # what it reported before it exited
    exited: bool = False
    why: str = ""  # it exited, as far as its host knows

    def same_model(self, other: RankHello) -> bool:
        """Return whether another rank has loaded the same model."""
        return _told(self.hello.model) == _told(other.model)

    def heartbeat(self, beat: Heartbeat, now: float) -> None:
        """Take in a heartbeat."""
        if beat.progress != self.progress:
            self.progress_at = now
        self.heard_at, self.progress, self.phase = now, beat.progress, beat.phase
        self.peak_rss_bytes = beat.peak_rss_bytes

    def finished(self, step: int, seconds: float, now: float) -> None:
        """Note that the rank has finished a step, which took `seconds`."""
        self.step_done = step
        self.busy_s += seconds
        self.heard_at = self.progress_at = now

    def status(self, now: float) -> RankStatus:
        """The rank as the API sees it."""
        return RankStatus(
            self.hello.rank,
            self.hello.pid,
            self.phase,
            self.step_done,
            round(now - self.heard_at, 3),
            round(now - self.progress_at, 3),
            self.peak_rss_bytes,
            self.busy_s,
            self.hello.model.device,
        )


class Outlet(Protocol):
    """The methods by which a group tells the controller of its decisions."""

    def to_agent(self, identity: bytes, message: AnyMessage) -> bool: ...

    def group_ready(self, hello: RankHello) -> None: ...

    def group_lost(self, reason: str) -> None: ...


class RankGroup:
    """The ranks of the current epoch, and the agents that start and kill them; `engine` names the controller."""

    def __init__(self, settings: ControlSettings, outlet: Outlet, engine: str = "") -> None:
        self._settings = settings
        self._outlet = outlet
        self.hosts = Placement(settings, engine, outlet.to_agent)
        self._probed_at = 0.0
        self._gone = ""
        self._start_at = 0.0
        self._deadline = 0.0
        self._heard_at: dict[int, float] = {}  # of each rank of a group that starts, loaded or not
        self._ready_at = 0.0
        self._suspected_at: float | None = None
        self._crashes: deque[float] = deque(maxlen=settings.crashes_to_open)  # of groups that were of no use
        self._of_use = False
        self._backoff_s = 0.0
        self._stopping = False
        self.phase = Phase.IDLE
        self.epoch = 0
        self.last_failure = ""
        self.circuit_open = False
        self.ranks: dict[int, RankVitals] = {}

    @property
    def running(self) -> bool:
        """Return whether steps may be sent."""
        return self.phase is Phase.RUNNING and self._suspected_at is None

    def reason(self, now: float) -> str:
        """Return the state of the group in words; "ready" when it is."""
        failure = f"; last failure: {self.last_failure}" if self.last_failure else ""
        if self.running:
            return "ready"
        if self._stopping:
            return "the engine is stopping"
        if self.circuit_open and self.phase is Phase.IDLE:
            wait = max(0.0, self._start_at - now)
            return f"the ranks crash again and again; the next try is in {wait:.0f} s{failure}"
        if self.phase is Phase.STARTING:
            return f"epoch {self.epoch} starts: {len(self.ranks)} of {self._settings.ranks} ranks are loaded{failure}"
        if len(self.hosts.here(now)) < self._settings.agents:
            return self._too_few(now) + failure
        if cut_off := unreachable(self.hosts.choose(now)):
            return f"other hosts cannot reach {', '.join(cut_off)}: set engine.host_address there{failure}"
        return f"the ranks are being started again{failure}"

    def status(self, now: float) -> list[RankStatus]:
        """The status of every rank that has said hello, in order."""
        return [self.ranks[rank].status(now) for rank in sorted(self.ranks)]

    # ---- what happens --------------------------------------------------------------------------

    def agent_hello(self, identity: bytes, hello: AgentHello, now: float) -> bool:
        """Take in the hello of an agent; false for an agent that speaks another protocol."""
        if hello.protocol_version != PROTOCOL_VERSION:
            log.error("agent refused", given=hello.protocol_version, needed=PROTOCOL_VERSION)
            return False
        before = self.hosts.hello(identity, hello, now)
        if before is not None and self.phase in (Phase.STARTING, Phase.RUNNING) and hello.name in self.hosts.shares:
            self._lose(f"{before} died and its ranks with it", now)
        elif before is not None and self.phase is Phase.CLEARING and hello.name in self.hosts.uncleared:
            self.hosts.kill_at(hello.name)
        return True

    def _too_few(self, now: float) -> str:
        here, needed = self.hosts.here(now), self._settings.agents
        if not here:
            return "no agent has connected, and agents start the ranks"
        names = ", ".join(agent.hello.name for agent in here)
        return f"{len(here)} of {needed} agents are here ({names}); the ranks start when all are"

    def group_started(self, started: GroupStarted) -> None:
        """Note that the first host's ranks run."""
        if started.epoch == self.epoch and self.phase is Phase.STARTING:
            self.hosts.started(started)

    def rank_hello(self, hello: RankHello, now: float) -> None:
        """Note that a rank of the current epoch has loaded its model."""
        if self.phase is not Phase.STARTING:
            return
        wanted = (PROTOCOL_VERSION, self._settings.ranks)
        if (hello.protocol_version, hello.size) != wanted or hello.rank >= hello.size:
            given = (hello.protocol_version, hello.size)
            self._lose(f"rank {hello.rank} has (protocol, ranks) = {given}, needed {wanted}", now)
            return
        first = next(iter(self.ranks.values()), None)
        if first is not None and not first.same_model(hello):
            self._lose(f"rank {hello.rank} has loaded another model than rank {first.hello.rank}", now)
            return
        if first is not None and first.hello.model.chunk_tokens != hello.model.chunk_tokens:
            this, that = (
                f"rank {one.rank} ({one.model.device}) cuts blocks of {one.model.chunk_tokens} tokens"
                for one in (hello, first.hello)
            )
            self._lose(f"{this}, {that}: give all ranks one engine.device, or set engine.chunk_tokens", now)
            return
        self.ranks[hello.rank] = RankVitals(hello, now)
        self._heard_at[hello.rank] = now
        if len(self.ranks) == self._settings.ranks:
            self.phase = Phase.RUNNING
            self._ready_at = now
            for vitals in self.ranks.values():
                vitals.heard_at = vitals.progress_at = now
            pids = {rank: self.ranks[rank].hello.pid for rank in sorted(self.ranks)}
            self.hosts.watch(pids)
            log.info("epoch ready", epoch=self.epoch, ranks=len(pids), pids=list(pids.values()), model=hello.model.name)
            self._outlet.group_ready(hello)

    def heartbeat(self, beat: Heartbeat, now: float) -> None:
        """Note that a rank of the current epoch is alive."""
        if beat.rank in self.ranks:
            self.ranks[beat.rank].heartbeat(beat, now)
        if beat.rank in self._heard_at:
            self._heard_at[beat.rank] = now

    def rank_failed(self, failed: RankFailed, now: float) -> None:
        """Note that a rank of the current epoch met an exception; another rank's failure may have caused it."""
        if failed.rank in self.ranks:
            self.ranks[failed.rank].failure = failed.error
            self._suspect(now)
        elif self.phase is Phase.STARTING:
            self._lose(f"rank {failed.rank} failed while it started: {failed.error}", now)

    def rank_exited(self, exited: RankExited, now: float) -> None:
        """Note that the process of a rank has ended."""
        if exited.epoch == self.epoch and exited.rank in self.ranks:
            self.ranks[exited.rank].exited = True
            self.ranks[exited.rank].why = exited.why
            self._suspect(now)

    def rank_unreachable(self, rank: int, now: float) -> None:
        """Note that a message to this rank could not be delivered."""
        if rank in self.ranks:
            self._suspect(now)

    def rank_confused(self, rank: int, what: str, now: float) -> None:
        """Give the group up because a rank sent something that cannot be."""
        self._lose(f"rank {rank}: {what}", now)

    def group_exited(self, identity: bytes, exited: GroupExited, now: float) -> None:
        """Note that a host has nothing of an epoch left."""
        hosts, agent = self.hosts, self.hosts.known(identity)
        name = agent.hello.name if agent is not None else ""
        if exited.epoch != self.epoch or self.phase is Phase.IDLE or name not in hosts.shares:
            return
        if self.phase is Phase.RUNNING and len(hosts.shares) > 1:
            # Its ranks may have ended because another host was lost, which shows a moment later.
            self._suspect(now)
            return
        if self.phase is not Phase.CLEARING and not self._stopping:
            named = name_culprit(self.ranks.values()) or "the ranks ended"
            why = f", {exited.why}" if exited.why and exited.why not in named else ""
            self._lose(f"{named} ({name_ending(exited)}){why}", now)
        hosts.uncleared.discard(name)
        if not hosts.uncleared:
            self._cleared(now)

    def stop(self) -> None:
        """Start no further epoch."""
        self._stopping = True

    def tick(self, now: float, step_sent_at: float | None, step: int) -> None:
        """Act on time: start, give up waiting, notice silence and standstill.

        `step_sent_at` is when the oldest unfinished step `step` went out, None when no step is under way.
        """
        match self.phase:
            case Phase.IDLE:
                if now >= self._start_at and not self._stopping:
                    self._start(now)
            case Phase.STARTING:
                self._look_after_agents(now)
                self._check_start(now)
            case Phase.RUNNING:
                self._look_after_agents(now)
                self._check_ranks(now, step_sent_at, step)
            case Phase.CLEARING:
                if now >= self._deadline or not self.hosts.uncleared:
                    self._cleared(now)

    def forgive_silence(self, now: float) -> None:
        """Count everybody as heard now: after the controller was held up, silence says nothing about the others."""
        self.hosts.forgive_silence(now)
        self._heard_at = dict.fromkeys(self._heard_at, now)
        for vitals in self.ranks.values():
            vitals.heard_at = vitals.progress_at = now

    # ---- decisions -----------------------------------------------------------------------------

    def _start(self, now: float) -> None:
        settings = self._settings
        agents = self.hosts.choose(now)
        if not agents or unreachable(agents):
            return
        self.epoch += 1
        self.phase = Phase.STARTING
        self.ranks = {}
        self._suspected_at = None
        self._of_use = False
        self._deadline = now + settings.start_deadline_s
        self._heard_at = dict.fromkeys(range(settings.ranks), now)
        hosts = [agent.hello.name for agent in agents]
        log.info("epoch starts", epoch=self.epoch, ranks=settings.ranks, agents=hosts)
        self.hosts.begin(self.epoch, agents)

    def _look_after_agents(self, now: float) -> None:
        """Give the group up when an agent has died: its host's ranks have died with it."""
        if now - self._probed_at < PROBE_S or self._stopping:
            return
        self._probed_at = now
        before, self._gone = self._gone, self.hosts.name_gone()
        if before and self._gone:
            self._lose(self._gone, now)

    def _check_start(self, now: float) -> None:
        """Give up a starting group of which a rank is late, or silent: a stopped rank would keep the others waiting."""
        limit = self._settings.start_deadline_s
        if now >= self._deadline:
            missing = sorted(set(range(self._settings.ranks)) - self.ranks.keys())
            self._lose(f"rank {', '.join(map(str, missing))} did not load within {limit:g} s", now)
            return
        rank, heard_at = min(self._heard_at.items(), key=lambda item: item[1])
        if now - heard_at > limit * START_SILENCE:
            also = self.hosts.name_silent(rank, heard_at)
            self._lose(f"rank {rank} has been silent for {now - heard_at:.1f} s while the ranks started{also}", now)

    def _check_ranks(self, now: float, step_sent_at: float | None, step: int) -> None:
        settings = self._settings
        if self.phase is not Phase.RUNNING:
            return
        if self._suspected_at is not None:
            culprit = name_culprit(self.ranks.values())
            if culprit is not None and any(v.exited and not v.failure for v in self.ranks.values()):
                self._lose(culprit, now)
            elif now - self._suspected_at >= EVIDENCE_S:
                self._lose(self.hosts.name_gone() or culprit or "the connection to a rank broke", now)
            return
        if now - self._ready_at >= settings.stable_s:
            self._forgive()
        for rank, vitals in self.ranks.items():
            silent = now - vitals.heard_at
            if silent > settings.heartbeat_deadline_s:
                also = self.hosts.name_silent(rank, now - settings.heartbeat_deadline_s)
                self._lose(f"rank {rank} has been silent for {silent:.1f} s in phase {vitals.phase!r}{also}", now)
                return
        if step_sent_at is None or now - step_sent_at <= settings.stall_limit_s:
            return
        behind = [v for v in self.ranks.values() if v.step_done < step]
        stuck = min(behind, key=lambda v: v.progress_at, default=None)
        if stuck is not None and now - stuck.progress_at > settings.stall_limit_s:
            text = f"has made no progress for {now - stuck.progress_at:.1f} s in phase {stuck.phase!r} of step {step}"
            self._lose(f"rank {stuck.hello.rank} {text}", now)

    def was_of_use(self) -> None:
        """Note that a request came further than ever: should this group be lost too, the next one may start at once.

        The wait between crashes spares a machine on which no work gets done; here some does.
        """
        self._of_use = True

    def _forgive(self) -> None:
        self._crashes.clear()
        self._backoff_s = 0.0
        self.circuit_open = False

    def _suspect(self, now: float) -> None:
        if self.phase is Phase.RUNNING and self._suspected_at is None and not self._stopping:
            self._suspected_at = now

    def _lose(self, reason: str, now: float) -> None:
        """Give the group up: kill it, tell everybody, and settle when the next one may start."""
        if self.phase in (Phase.IDLE, Phase.CLEARING):
            return
        settings = self._settings
        self.phase = Phase.CLEARING
        self.last_failure = f"{reason} (epoch {self.epoch})"
        self._deadline = now + CLEAR_DEADLINE_S
        if self._of_use:
            self._forgive()
        else:
            self._crashes.append(now)
        many = len(self._crashes) == settings.crashes_to_open and now - self._crashes[0] <= settings.stable_s
        self.circuit_open = many
        self._start_at = now + (settings.cool_down_s if many else self._backoff_s)
        self._backoff_s = min(settings.backoff_max_s, max(settings.backoff_s, 2 * self._backoff_s))
        log.error("epoch lost", epoch=self.epoch, reason=reason, circuit_open=many)
        self.hosts.kill()
        self._outlet.group_lost(reason)

    def _cleared(self, now: float) -> None:
        self.phase = Phase.IDLE
        self.ranks = {}
        self._suspected_at = None
        self._start_at = max(self._start_at, now)


def _told(model: LoadedModel) -> tuple[object, ...]:
    """The facts about the model that all ranks must agree on."""
    return model.name, model.hidden_size, model.vocab_size, model.end_tokens, model.manifest and model.manifest.model


def name_culprit(ranks: Iterable[RankVitals]) -> str | None:
    """Name the rank that brought the group down, as far as that shows.

    A rank that died without a word is the cause; those that reported an error meanwhile are its victims.
    """
    known = list(ranks)
    silent = [v for v in known if v.exited and not v.failure]
    failed = [v for v in known if v.failure]
    if silent:
        names = " and ".join(f"rank {v.hello.rank} (pid {v.hello.pid})" for v in silent)
        why = next((v.why for v in silent if v.why), "")
        return f"{names} died, {why}" if why else f"{names} died"
    if not failed:
        return None
    text = f"rank {failed[0].hello.rank} failed: {failed[0].failure}"
    quiet = ", ".join(str(v.hello.rank) for v in known if not v.failure)
    return f"{text}; rank {quiet} reported nothing" if quiet else text


def name_ending(exited: GroupExited) -> str:
    """Say how the processes of a group ended; if they ended by themselves, the last line of their output says why."""
    if exited.exit_code < 0:
        names = {number.value: number.name for number in signal.Signals}
        return f"killed by {names.get(-exited.exit_code, f'signal {-exited.exit_code}')}"
    tail = exited.tail.strip().splitlines()[-1:] or ["no output"]
    return f"exit code {exited.exit_code}: {tail[0][:300]}"
