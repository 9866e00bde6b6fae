"""The known agents, the hosts that share an epoch's ranks, how groups start, and what is cleared away after them."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate

import structlog

from dist_attn.control.settings import ControlSettings
from dist_attn.settings import RankTerms
from dist_attn.wire.agent_messages import AgentHello, GroupStarted, KillGroup, StartGroup, WatchRanks
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

    def is_here(self, now: float) -> bool:
        """Return whether the agent has been heard lately."""
        return not self.gone and now - self.heard_at <= SILENT_S


def unreachable(agents: Iterable[KnownAgent]) -> list[str]:
    """The hosts that others cannot reach: their address is of their own machine alone, while others have a real one."""
    loopback = {agent.hello.name: agent.hello.address.startswith("127.") or not agent.hello.address for agent in agents}
    return [name for name, local in loopback.items() if local] if not all(loopback.values()) else []


def shares_of(ranks: int, hosts: int) -> list[int]:
    """The number of ranks on each host, as equal as can be; larger shares come first."""
    share, more = divmod(ranks, hosts)
    return [share + (host < more) for host in range(hosts)]


class Placement:
    """The agents by the names of their hosts, and the ranks of the current epoch on each.

    `send` hands a message to ZeroMQ; it is false when no connection is left.
    """

    def __init__(self, settings: ControlSettings, engine: str, send: Callable[[bytes, AnyMessage], bool]) -> None:
        self._settings = settings
        self._engine = engine
        self._send = send
        self._agents: dict[str, KnownAgent] = {}
        self._epoch = 0
        self.shares: dict[str, range] = {}
        """The ranks on each host of the current epoch."""
        self.uncleared: set[str] = set()

    def hello(self, identity: bytes, hello: AgentHello, now: float) -> KnownAgent | None:
        """Take in an agent's hello; returns the agent that it replaces, None if it replaces none.

        Of two with one name the first has the host's processes, and stays until it dies or falls silent.
        """
        before = self._agents.get(hello.name)
        if before is not None and before.identity == identity:
            before.hello, before.heard_at, before.gone = hello, now, False
            return None
        if before is not None and before.is_here(now) and self._tell(hello.name, Ping()):
            return None
        self._agents[hello.name] = KnownAgent(identity, hello, now)
        log.debug("agent connected", agent=hello.name, pid=hello.pid, address=hello.address)
        return before

    def _tell(self, name: str, message: AnyMessage) -> bool:
        """Send to the agent of a host; false when it is gone."""
        agent = self._agents[name]
        if self._send(agent.identity, message):
            return True
        agent.gone = True
        return False

    def known(self, identity: bytes) -> KnownAgent | None:
        """The agent of this identity, unless it has been replaced."""
        return next((agent for agent in self._agents.values() if agent.identity == identity), None)

    def here(self, now: float) -> list[KnownAgent]:
        """The agents that have been heard lately, in the order in which their hosts came."""
        return [agent for agent in self._agents.values() if agent.is_here(now)]

    def choose(self, now: float) -> list[KnownAgent]:
        """Choose the agents for the next group; none while there are too few."""
        here, count = self.here(now), self._settings.agents
        return here[:count] if len(here) >= count else []

    def forgive_silence(self, now: float) -> None:
        """Count every agent as heard now: after the controller was held up, silence says nothing about them."""
        for agent in self._agents.values():
            agent.heard_at = max(agent.heard_at, now)

    def begin(self, epoch: int, agents: list[KnownAgent]) -> None:
        """Start an epoch on these hosts: the first one at once."""
        shares = shares_of(self._settings.ranks, len(agents))
        places = zip(agents, shares, accumulate(shares), strict=True)
        self._epoch = epoch
        self.shares = {agent.hello.name: range(stop - count, stop) for agent, count, stop in places}
        self._start(0, "")

    def started(self, message: GroupStarted) -> None:
        """Start the ranks of the other hosts, which are told where they find those of the first."""
        for node in range(1, len(self.shares)):
            self._start(node, message.rendezvous)

    def _start(self, node: int, rendezvous: str) -> None:
        terms = {name: getattr(self._settings, name) for name in RankTerms.model_fields if name not in OF_EACH_HOST}
        counts = [len(own) for own in self.shares.values()]
        self._tell(list(self.shares)[node], StartGroup(self._epoch, self._engine, counts, node, terms, rendezvous))

    def watch(self, pids: dict[int, int]) -> None:
        """Let every host tell when one of its ranks ends; `pids` by rank, all of them."""
        for name, own in self.shares.items():
            self._tell(name, WatchRanks(self._epoch, [pids[rank] for rank in own]))

    def kill(self) -> None:
        """Let every host kill what it has of the epoch; a host that is gone has nothing left to be waited for."""
        self.uncleared = {name for name in self.shares if self.kill_at(name)}

    def kill_at(self, name: str) -> bool:
        """Let a host kill what it has of the epoch, as far as its agent can be reached."""
        return self._tell(name, KillGroup(self._epoch, self._engine))

    def name_gone(self) -> str:
        """The agents that died, and which ranks with them; empty while all can be reached."""
        gone = [
            f"{self._agents[name]} died, and {name_ranks(own)} with it"
            for name, own in self.shares.items()
            if not self._tell(name, Ping())
        ]
        return " and ".join(gone)

    def name_silent(self, rank: int, since: float) -> str:
        """The agent of a rank's host if it was not heard after `since` either."""
        agent = next(self._agents[name] for name, own in self.shares.items() if rank in own)
        return f", and so has {agent}" if agent.heard_at < since else ""


def name_ranks(ranks: range) -> str:
    """Ranks in words."""
    return f"rank {ranks.start}" if len(ranks) == 1 else f"ranks {ranks.start} to {ranks.stop - 1}"
