"""The messages between the controller and the agents, which start and kill ranks."""

from dist_attn.wire.specs import Count, Message, Name


class StartGroup(Message, frozen=True):
    """Start the ranks of `epoch` that are this host's share, after killing what is left of other epochs.

    `shares` are the numbers of ranks on each host, in order of rank; this host's is `shares[node]`. `engine` is the
    controller's own name: what two controllers have started is never taken for one group. Of several hosts node 0 is
    asked without a `rendezvous`, answers with one, and the other nodes are given it. `terms` are the settings that
    every rank has from the controller, whatever those of its own host say.
    """

    epoch: Count
    engine: str
    shares: list[Count]
    node: Count
    terms: dict[str, bool | int | float | str]
    rendezvous: str = ""

    @property
    def ranks(self) -> int:
        """The number of ranks of the whole group."""
        return sum(self.shares)

    @property
    def first_rank(self) -> int:
        """The first of this host's ranks."""
        return sum(self.shares[: self.node])

    @property
    def local_ranks(self) -> int:
        """The number of ranks on this host."""
        return self.shares[self.node]

    @property
    def by_mpiexec(self) -> bool:
        """Return whether mpiexec starts the ranks; else the agent does, one by one."""
        return self.terms["backend"] == "mpi" and self.ranks > 1


class WatchRanks(Message, frozen=True):
    """All ranks of `epoch` have said hello: report at once when one of these processes ends.

    `pids` are those of this host, in order of rank.
    """

    epoch: Count
    pids: list[Count]


class KillGroup(Message, frozen=True):
    """Kill every process of `epoch` on this host, mpiexec included."""

    epoch: Count
    engine: str


class StopAgent(Message, frozen=True):
    """Kill all ranks and exit."""


class AgentHello(Message, frozen=True):
    """First message of an agent, repeated every second: it also says that the agent is alive.

    `name` is the host's among all agents of a controller, `address` that by which other hosts reach it.
    """

    protocol_version: int
    pid: Count
    name: Name
    address: str


class GroupStarted(Message, frozen=True):
    """The ranks of `epoch` on the first of several hosts run; those of the others find them at HOST:PORT."""

    epoch: Count
    rendezvous: str


class RankExited(Message, frozen=True):
    """The process of this rank of `epoch` has ended, whatever mpiexec says about it later.

    `why` is what its host knows of the cause, as that it ran out of memory; mostly nothing.
    """

    epoch: Count
    rank: Count
    why: str = ""


class GroupExited(Message, frozen=True):
    """No process of `epoch` is left; one ended the group with `exit_code`, `tail` is the end of their output.

    `why` as of RankExited.
    """

    epoch: Count
    exit_code: int
    tail: str
    why: str = ""


ToAgent = StartGroup | WatchRanks | KillGroup | StopAgent
FromAgent = AgentHello | GroupStarted | RankExited | GroupExited
