"""What the controller and the agents, which start and kill ranks, say to each other."""

from dist_attn.wire.message import Count, Message

__all__ = [
    "AgentHello",
    "GroupExited",
    "GroupStarted",
    "KillGroup",
    "RankExited",
    "StartGroup",
    "StopAgent",
    "WatchRanks",
]


class StartGroup(Message, frozen=True):
    """Start `ranks` rank processes for `epoch`; the agent kills what is left of older epochs first."""

    epoch: Count
    ranks: Count
    backend: str
    model: str
    controller_address: str


class WatchRanks(Message, frozen=True):
    """All ranks of `epoch` have said hello: report at once when one of these processes ends; pids in order of rank."""

    epoch: Count
    pids: list[Count]


class KillGroup(Message, frozen=True):
    """Kill every process of `epoch`: the launcher and the pids that its ranks reported."""

    epoch: Count
    pids: list[Count]


class StopAgent(Message, frozen=True):
    """Kill all ranks and exit."""


class AgentHello(Message, frozen=True):
    """First message of an agent, repeated every second: it also says that the agent is alive."""

    protocol_version: int
    host: str
    pid: Count


class GroupStarted(Message, frozen=True):
    """The launcher of `epoch` runs."""

    epoch: Count
    launcher_pid: Count


class RankExited(Message, frozen=True):
    """The process of this rank of `epoch` has ended, whatever the launcher says about it later."""

    epoch: Count
    rank: Count
    pid: Count


class GroupExited(Message, frozen=True):
    """No process of `epoch` is left; the launcher ended with `exit_code`, `tail` is the end of its output."""

    epoch: Count
    exit_code: int
    tail: str
