"""The life of the rank group: epochs that only grow, who is alive, why a group was lost, when the next one starts.

No clock and no sockets: every method is told the time, and what it decides goes out through `Outlet`.

    idle --(agent here, back-off over)--> starting --(every rank said hello)--> running
      ^                                      |                                    |
      └──(nothing of the epoch is left)── clearing <──(a rank failed, died, fell silent, stuck)──┘
"""

from collections import deque
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import structlog

from dist_attn.control.settings import ControlSettings
from dist_attn.control.vitals import RankVitals, name_culprit, name_ending
from dist_attn.wire.agent_messages import (
    AgentHello,
    GroupExited,
    KillGroup,
    RankExited,
    StartGroup,
    WatchRanks,
)
from dist_attn.wire.messages import (
    PROTOCOL_VERSION,
    AnyMessage,
    Heartbeat,
    Ping,
    RankFailed,
    RankHello,
    RankStatus,
)

__all__ = ["Outlet", "Phase", "RankGroup"]

AGENT_SILENT_S = 5.0
EVIDENCE_S = 0.3  # after the first sign of a failure: who died shows a moment after who noticed it
CLEAR_DEADLINE_S = 10.0

log = structlog.get_logger("dist_attn.control")


class Phase(StrEnum):
    """Where the group is in its life."""

    IDLE = "idle"
    STARTING = "starting"
    RUNNING = "running"
    CLEARING = "clearing"


class Outlet(Protocol):
    """What a group tells the rest of the controller."""

    def to_agent(self, identity: bytes, message: AnyMessage) -> bool: ...

    def group_ready(self, hello: RankHello) -> None: ...

    def group_lost(self, reason: str) -> None: ...


@dataclass(frozen=True)
class _Agent:
    identity: bytes
    pid: int
    host: str


class RankGroup:
    """The ranks of the current epoch and the agent that starts and kills them."""

    def __init__(self, settings: ControlSettings, rank_address: str, outlet: Outlet) -> None:
        self._settings = settings
        self._rank_address = rank_address
        self._outlet = outlet
        self._agent: _Agent | None = None
        self.agent_heard = 0.0
        self._start_at = 0.0
        self._deadline = 0.0
        self._ready_at = 0.0
        self._suspected_at: float | None = None
        self._crashes: deque[float] = deque(maxlen=settings.crashes_to_open)
        self._backoff_s = 0.0
        self._stopping = False
        self.phase = Phase.IDLE
        self.epoch = 0
        self.last_failure = ""
        self.circuit_open = False
        self.ranks: dict[int, RankVitals] = {}

    @property
    def running(self) -> bool:
        """Whether steps may be sent."""
        return self.phase is Phase.RUNNING and self._suspected_at is None

    def reason(self, now: float) -> str:
        """The state of the group in words; "ready" when it is."""
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
        if not self._agent_present(now):
            return f"no agent has connected, so there is nobody to start ranks{failure}"
        return f"the ranks are being started again{failure}"

    def status(self, now: float) -> list[RankStatus]:
        """Every rank that has said hello, in order."""
        return [self.ranks[rank].status(now) for rank in sorted(self.ranks)]

    # ---- what happens --------------------------------------------------------------------------

    def agent_hello(self, identity: bytes, hello: AgentHello, now: float) -> bool:
        """An agent says that it is here; false for one that speaks another protocol."""
        if hello.protocol_version != PROTOCOL_VERSION:
            log.error("agent refused", given=hello.protocol_version, needed=PROTOCOL_VERSION)
            return False
        before = self._agent
        if before is None or before.identity != identity:
            if self._agent_present(now) and self._tell_agent(Ping()):
                # Two agents at once: the first one holds the ranks and stays until it dies or falls silent.
                return True
            self._agent = _Agent(identity, hello.pid, hello.host)
            self.agent_heard = now
            log.info("agent connected", host=hello.host, pid=hello.pid)
            if before is not None and self.phase in (Phase.STARTING, Phase.RUNNING):
                self._lose(f"the agent (pid {before.pid}) died and its ranks with it", now)
            elif self.phase is Phase.CLEARING:
                self._tell_agent(KillGroup(self.epoch, []))
        self.agent_heard = now
        return True

    def _agent_present(self, now: float) -> bool:
        return self._agent is not None and now - self.agent_heard <= AGENT_SILENT_S

    def rank_hello(self, hello: RankHello, now: float) -> None:
        """A rank of the current epoch has loaded its model."""
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
        self.ranks[hello.rank] = RankVitals(hello, now)
        if len(self.ranks) == self._settings.ranks:
            self.phase = Phase.RUNNING
            self._ready_at = now
            for vitals in self.ranks.values():
                vitals.heard_at = vitals.progress_at = now
            pids = [self.ranks[rank].hello.pid for rank in range(self._settings.ranks)]
            self._tell_agent(WatchRanks(self.epoch, pids))
            log.info("epoch ready", epoch=self.epoch, ranks=len(pids), pids=pids, model=hello.model)
            self._outlet.group_ready(hello)

    def heartbeat(self, beat: Heartbeat, now: float) -> None:
        """A rank of the current epoch is alive."""
        if beat.rank in self.ranks:
            self.ranks[beat.rank].heartbeat(beat, now)

    def rank_failed(self, failed: RankFailed, now: float) -> None:
        """A rank of the current epoch met an exception; it may be the victim of another one."""
        if failed.rank in self.ranks:
            self.ranks[failed.rank].failure = failed.error
            self._suspect(now)
        elif self.phase is Phase.STARTING:
            self._lose(f"rank {failed.rank} failed while it started: {failed.error}", now)

    def rank_exited(self, exited: RankExited, now: float) -> None:
        """The process of a rank has ended."""
        if exited.epoch == self.epoch and exited.rank in self.ranks:
            self.ranks[exited.rank].exited = True
            self._suspect(now)

    def rank_unreachable(self, rank: int, now: float) -> None:
        """A message to this rank had nobody to go to."""
        if rank in self.ranks:
            self._suspect(now)

    def rank_confused(self, rank: int, what: str, now: float) -> None:
        """A rank sent something that cannot be."""
        self._lose(f"rank {rank}: {what}", now)

    def group_exited(self, exited: GroupExited, now: float) -> None:
        """Nothing of an epoch is left."""
        if exited.epoch != self.epoch or self.phase is Phase.IDLE:
            return
        if self.phase is not Phase.CLEARING and not self._stopping:
            named = name_culprit(self.ranks.values()) or "the ranks ended"
            self._lose(f"{named} ({name_ending(exited)})", now)
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
                if self._agent_present(now) and now >= self._start_at and not self._stopping:
                    self._start(now)
            case Phase.STARTING:
                if now >= self._deadline:
                    missing = sorted(set(range(self._settings.ranks)) - self.ranks.keys())
                    limit = self._settings.start_deadline_s
                    self._lose(f"rank {', '.join(map(str, missing))} did not load within {limit:g} s", now)
            case Phase.RUNNING:
                self._check_ranks(now, step_sent_at, step)
            case Phase.CLEARING:
                if now >= self._deadline:
                    self._cleared(now)

    def forgive_silence(self, now: float) -> None:
        """The controller itself was held up: what it did not hear meanwhile says nothing about the others."""
        self.agent_heard = max(self.agent_heard, now)
        for vitals in self.ranks.values():
            vitals.heard_at = vitals.progress_at = now

    # ---- decisions -----------------------------------------------------------------------------

    def _start(self, now: float) -> None:
        self.epoch += 1
        self.phase = Phase.STARTING
        self.ranks = {}
        self._suspected_at = None
        self._deadline = now + self._settings.start_deadline_s
        log.info("epoch starts", epoch=self.epoch, ranks=self._settings.ranks)
        settings = self._settings
        self._tell_agent(StartGroup(self.epoch, settings.ranks, settings.backend, settings.model, self._rank_address))

    def _check_ranks(self, now: float, step_sent_at: float | None, step: int) -> None:
        settings = self._settings
        if self._suspected_at is not None:
            culprit = name_culprit(self.ranks.values())
            if culprit is not None and any(v.exited and not v.failure for v in self.ranks.values()):
                self._lose(culprit, now)
            elif now - self._suspected_at >= EVIDENCE_S:
                self._lose(culprit or "the connection to a rank broke", now)
            return
        if now - self._ready_at >= settings.stable_s:
            self._crashes.clear()
            self._backoff_s = 0.0
            self.circuit_open = False
        for rank, vitals in self.ranks.items():
            silent = now - vitals.heard_at
            if silent > settings.heartbeat_deadline_s:
                self._lose(f"rank {rank} has been silent for {silent:.1f} s in phase {vitals.phase!r}", now)
                return
        if step_sent_at is None or now - step_sent_at <= settings.stall_limit_s:
            return
        behind = [v for v in self.ranks.values() if v.step_done < step]
        stuck = min(behind, key=lambda v: v.progress_at, default=None)
        if stuck is not None and now - stuck.progress_at > settings.stall_limit_s:
            text = f"has made no progress for {now - stuck.progress_at:.1f} s in phase {stuck.phase!r} of step {step}"
            self._lose(f"rank {stuck.hello.rank} {text}", now)

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
        self._crashes.append(now)
        many = len(self._crashes) == settings.crashes_to_open and now - self._crashes[0] <= settings.stable_s
        self.circuit_open = many
        self._start_at = now + (settings.cool_down_s if many else self._backoff_s)
        self._backoff_s = min(settings.backoff_max_s, max(settings.backoff_s, 2 * self._backoff_s))
        log.error("epoch lost", epoch=self.epoch, reason=reason, circuit_open=many)
        self._tell_agent(KillGroup(self.epoch, [vitals.hello.pid for vitals in self.ranks.values()]))
        self._outlet.group_lost(reason)

    def _cleared(self, now: float) -> None:
        self.phase = Phase.IDLE
        self.ranks = {}
        self._suspected_at = None
        self._start_at = max(self._start_at, now)

    def _tell_agent(self, message: AnyMessage) -> bool:
        """Send to the agent; false when it is not there."""
        return self._agent is not None and self._outlet.to_agent(self._agent.identity, message)
