"""The known agents, the hosts that share an epoch's ranks, how groups start, and what is cleared away after them."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import structlog

from dist_attn.control.settings import ControlSettings
from dist_attn.settings import RankTerms
from dist_attn.wire.agent_messages import AgentHello, GroupStarted, HostShare, KillGroup, StartGroup, WatchRanks
from dist_attn.wire.messages import AnyMessage
from dist_attn.wire.rank_messages import Ping

OF_EACH_HOST = ("keys_dir", "start_deadline_s")  # settings of ranks that the agent of each host knows
SILENT_S = 5.0  # hellos come every second

log = structlog.get_logger("dist_attn.control")


@dataclass
class KnownAgent:
    """One agent. Times are monotonic seconds."""

    identity: bytes
    hello: AgentHello
    heard_at: float
    gone: bool = False  # a message could not be delivered, and none has come since

    def __str__(self) -> str:
        return f"the agent of {self.hello.name} (pid {self.hello.pid})"


class Roster:
    """Agents by name. `send` hands a message to ZeroMQ; it is false when no connection is left."""

    def __init__(self, send: Callable[[bytes, AnyMessage], bool]) -> None:
        self._send = send
        self._agents: dict[str, KnownAgent] = {}

    def hello(self, identity: bytes, hello: AgentHello, now: float) -> KnownAgent | None:
        """Take in an agent's hello; returns the agent that it replaces, None if it replaces none.

        Of two with one name the first has the host's processes, and stays until it dies or falls silent.
        """
        before = self._agents.get(hello.name)
        if before is not None and before.identity == identity:
            before.hello, before.heard_at, before.gone = hello, now, False
            return None
        if before is not None and self._is_here(before, now) and self.tell(hello.name, Ping()):
            return None
        self._agents[hello.name] = KnownAgent(identity, hello, now)
        log.debug("agent connected", agent=hello.name, host=hello.host, pid=hello.pid, address=hello.address)
        return before

    def tell(self, name: str, message: AnyMessage) -> bool:
        """Send to the agent of a host; false when it is not there."""
        agent = self._agents.get(name)
        if agent is None or not self._send(agent.identity, message):
            if agent is not None:
                agent.gone = True
            return False
        return True

    def name_of(self, identity: bytes) -> str:
        """The name of an agent's host; empty for an agent that is not known, or no longer."""
        return next((name for name, agent in self._agents.items() if agent.identity == identity), "")

    def get(self, name: str) -> KnownAgent | None:
        """The agent of a host."""
        return self._agents.get(name)

    def here(self, now: float) -> list[KnownAgent]:
        """The agents that have been heard lately, in the order in which they came."""
        return [agent for agent in self._agents.values() if self._is_here(agent, now)]

    def choose(self, count: int, before: Iterable[str], now: float) -> list[KnownAgent]:
        """Choose `count` agents for the next group, those of the last one first; none while there are too few."""
        last = list(before)
        here = sorted(self.here(now), key=lambda agent: agent.hello.name not in last)
        return here[:count] if len(here) >= count else []

    def forgive_silence(self, now: float) -> None:
        """Count every agent as heard now: after the controller was held up, silence says nothing about them."""
        for agent in self._agents.values():
            agent.heard_at = max(agent.heard_at, now)

    def heard_at(self, identity: bytes) -> float:
        """The time at which an agent was last heard; 0 for one that never was."""
        return next((agent.heard_at for agent in self._agents.values() if agent.identity == identity), 0.0)

    def _is_here(self, agent: KnownAgent, now: float) -> bool:
        return not agent.gone and now - agent.heard_at <= SILENT_S


def unreachable(agents: Iterable[KnownAgent]) -> list[str]:
    """The hosts that others cannot reach: their address is of their own machine alone, while others have a real one."""
    loopback = {agent.hello.name: agent.hello.address.startswith("127.") or not agent.hello.address for agent in agents}
    return [name for name, local in loopback.items() if local] if not all(loopback.values()) else []


def shares_of(ranks: int, hosts: int) -> list[int]:
    """The number of ranks on each host, as equal as can be; larger shares come first."""
    share, more = divmod(ranks, hosts)
    return [share + (host < more) for host in range(hosts)]


class Placement:
    """The hosts of the current epoch, in order of their ranks."""

    def __init__(self, settings: ControlSettings, engine: str, roster: Roster) -> None:
        self._settings = settings
        self._engine = engine
        self._roster = roster
        self._epoch = 0
        self._hosts: list[HostShare] = []
        self._waiting: list[int] = []  # nodes that are told once the first has chosen where the ranks meet
        self.names: list[str] = []
        self.uncleared: set[str] = set()

    def begin(self, epoch: int, agents: list[KnownAgent]) -> None:
        """Start an epoch on these hosts: the first one at once."""
        self._epoch = epoch
        self.names = [agent.hello.name for agent in agents]
        shares = shares_of(self._settings.ranks, len(agents))
        self._hosts = [HostShare(agent.hello.address, ranks) for agent, ranks in zip(agents, shares, strict=True)]
        # mpiexec starts the ranks of all hosts from the first.
        self._waiting = [] if self._settings.starts_by == "mpiexec" else list(range(1, len(agents)))
        self._start(0, "")

    def started(self, name: str, message: GroupStarted) -> None:
        """Note that the processes of a host run: the first host says where the ranks of the others find its own."""
        log.debug("processes run", epoch=message.epoch, agent=name, pid=message.launcher_pid)
        if name == self.names[0]:
            waiting, self._waiting = self._waiting, []
            for node in waiting:
                self._start(node, message.rendezvous)

    def _start(self, node: int, rendezvous: str) -> None:
        terms = {name: getattr(self._settings, name) for name in RankTerms.model_fields if name not in OF_EACH_HOST}
        launcher = self._settings.starts_by
        start = StartGroup(self._epoch, self._engine, self._hosts, node, launcher, terms, rendezvous)
        self._roster.tell(self.names[node], start)

    def watch(self, pids: dict[int, int]) -> None:
        """Let every host tell when one of its ranks ends; `pids` by rank, all of them."""
        for name, own in self._by_host():
            self._roster.tell(name, WatchRanks(self._epoch, own.start, [pids[rank] for rank in own]))

    def kill(self, pids: dict[int, int]) -> None:
        """Let every host kill what it has of the epoch; a host that is gone has nothing left to be waited for."""
        self._waiting = []
        self.uncleared = set()
        for name, own in self._by_host():
            order = KillGroup(self._epoch, self._engine, [pids[rank] for rank in own if rank in pids])
            if self._roster.tell(name, order):
                self.uncleared.add(name)

    def kill_again(self, name: str) -> None:
        """Let an agent that has come meanwhile clear away what the one before it left."""
        self._roster.tell(name, KillGroup(self._epoch, self._engine, []))

    def name_gone(self) -> str:
        """The agents that died, and which ranks with them; empty while all can be reached."""
        gone = [
            f"{agent} died, and {name_ranks(own)} with it"
            for name, own in self._by_host()
            if not self._roster.tell(name, Ping()) and (agent := self._roster.get(name)) is not None
        ]
        return " and ".join(gone)

    def name_silent(self, rank: int, since: float) -> str:
        """The agent of a rank's host if it was not heard after `since` either."""
        for name, own in self._by_host():
            agent = self._roster.get(name)
            if rank in own and agent is not None and agent.heard_at < since:
                return f", and so has {agent}"
        return ""

    def _by_host(self) -> list[tuple[str, range]]:
        first, ranks = 0, []
        for name, host in zip(self.names, self._hosts, strict=True):
            ranks.append((name, range(first, first + host.ranks)))
            first += host.ranks
        return ranks


def name_ranks(ranks: range) -> str:
    """Ranks in words."""
    return f"rank {ranks.start}" if len(ranks) == 1 else f"ranks {ranks.start} to {ranks.stop - 1}"
