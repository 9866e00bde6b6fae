"""The agents that a controller can speak to: one per host's name, and which of them the next group is spread over."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import structlog

from dist_attn.wire.agent_messages import AgentHello
from dist_attn.wire.messages import AnyMessage
from dist_attn.wire.rank_messages import Ping

__all__ = ["KnownAgent", "Roster", "unreachable"]

SILENT_S = 5.0  # hellos come every second

log = structlog.get_logger("dist_attn.control")


@dataclass
class KnownAgent:
    """One agent. Times are monotonic seconds."""

    identity: bytes
    hello: AgentHello
    heard_at: float
    gone: bool = False  # a message had nobody to go to, and it has said nothing since

    def __str__(self) -> str:
        return f"the agent of {self.hello.name} (pid {self.hello.pid})"


class Roster:
    """Agents by name. `send` hands a message to ZeroMQ; it is false when there is nobody any more."""

    def __init__(self, send: Callable[[bytes, AnyMessage], bool]) -> None:
        self._send = send
        self._agents: dict[str, KnownAgent] = {}

    def hello(self, identity: bytes, hello: AgentHello, now: float) -> KnownAgent | None:
        """An agent says that it is here; the one that it takes the place of, if it does.

        Of two with one name the first has the host's processes, and stays until it dies or falls silent.
        """
        before = self._agents.get(hello.name)
        if before is not None and before.identity == identity:
            before.hello, before.heard_at, before.gone = hello, now, False
            return None
        if before is not None and self._is_here(before, now) and self.tell(hello.name, Ping()):
            return None
        self._agents[hello.name] = KnownAgent(identity, hello, now)
        log.info("agent connected", agent=hello.name, host=hello.host, pid=hello.pid, address=hello.address)
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
        """The host of an agent; empty for one that is not known, or no longer."""
        return next((name for name, agent in self._agents.items() if agent.identity == identity), "")

    def get(self, name: str) -> KnownAgent | None:
        """The agent of a host."""
        return self._agents.get(name)

    def here(self, now: float) -> list[KnownAgent]:
        """Those that have been heard lately, those that came first in front."""
        return [agent for agent in self._agents.values() if self._is_here(agent, now)]

    def choose(self, count: int, before: Iterable[str], now: float) -> list[KnownAgent]:
        """So many agents for the next group, those of the last one first; none while there are too few."""
        last = list(before)
        here = sorted(self.here(now), key=lambda agent: agent.hello.name not in last)
        return here[:count] if len(here) >= count else []

    def forgive_silence(self, now: float) -> None:
        """What was not heard while the controller itself was held up says nothing about the agents."""
        for agent in self._agents.values():
            agent.heard_at = max(agent.heard_at, now)

    def heard_at(self, identity: bytes) -> float:
        """When an agent was last heard; 0 for one that never was."""
        return next((agent.heard_at for agent in self._agents.values() if agent.identity == identity), 0.0)

    def _is_here(self, agent: KnownAgent, now: float) -> bool:
        return not agent.gone and now - agent.heard_at <= SILENT_S


def unreachable(agents: Iterable[KnownAgent]) -> list[str]:
    """Those that other hosts cannot reach: with an address of their own machine alone, while others have a real one."""
    loopback = {agent.hello.name: agent.hello.address.startswith("127.") or not agent.hello.address for agent in agents}
    return [name for name, local in loopback.items() if local] if not all(loopback.values()) else []
