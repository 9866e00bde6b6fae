"""Where the ranks of an epoch are: which hosts share them, what each is told, and what of them is cleared away."""

import structlog

from dist_attn.control.roster import KnownAgent, Roster
from dist_attn.control.settings import ControlSettings
from dist_attn.wire.agent_messages import GroupStarted, HostShare, KillGroup, StartGroup, WatchRanks
from dist_attn.wire.rank_messages import Ping

__all__ = ["Placement", "shares_of"]

log = structlog.get_logger("dist_attn.control")


def shares_of(ranks: int, hosts: int) -> list[int]:
    """How many ranks each host has: as equal as can be, the larger shares first."""
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
        """The processes of a host run: the first one says where the ranks of the others find its own."""
        log.info("processes run", epoch=message.epoch, agent=name, pid=message.launcher_pid)
        if name == self.names[0]:
            waiting, self._waiting = self._waiting, []
            for node in waiting:
                self._start(node, message.rendezvous)

    def _start(self, node: int, rendezvous: str) -> None:
        settings = self._settings
        start = StartGroup(
            epoch=self._epoch,
            engine=self._engine,
            hosts=self._hosts,
            node=node,
            backend=settings.backend,
            launcher=settings.starts_by,
            rendezvous=rendezvous,
            heartbeat_s=settings.heartbeat_s,
            silence_deadline_s=settings.silence_deadline_s,
            exchange_deadline_s=settings.exchange_deadline_s,
            check_finite=settings.check_finite,
            weights=settings.weights,
            chunk_tokens=settings.chunk_tokens,
        )
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
        first, found = 0, []
        for name, host in zip(self.names, self._hosts, strict=True):
            found.append((name, range(first, first + host.ranks)))
            first += host.ranks
        return found


def name_ranks(ranks: range) -> str:
    """Ranks in words."""
    return f"rank {ranks.start}" if len(ranks) == 1 else f"ranks {ranks.start} to {ranks.stop - 1}"
