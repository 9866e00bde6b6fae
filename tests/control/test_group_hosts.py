"""A rank group on several hosts: where they meet, which of them was lost, when nothing is left of an epoch."""

from dist_attn.control.group import Phase
from dist_attn.wire.agent_messages import (
    AgentHello,
    GroupExited,
    GroupStarted,
    KillGroup,
    RankExited,
    StartGroup,
    WatchRanks,
)
from dist_attn.wire.messages import PROTOCOL_VERSION
from dist_attn.wire.rank_messages import RankFailed
from tests.control.test_group import SETTINGS, Scene


def several(scene, now=None):
    """Two agents on hosts of their own say hello: "a" first."""
    for name, address in (("a", "10.0.0.1"), ("b", "10.0.0.2")):
        hello = AgentHello(PROTOCOL_VERSION, 9, name, address)
        scene.group.agent_hello(name.encode(), hello, scene.now if now is None else now)


def test_the_second_host_is_told_where_the_first_one_listens():
    """Node 0 is started alone; its answer carries the meeting place, which goes to node 1; each watches its own."""
    scene = Scene(SETTINGS.replace(agents=2, rank_address="tcp://127.0.0.1:1"))
    scene.outlet.agents = {b"a", b"b"}
    several(scene)
    scene.group.tick(scene.now, None, 0)
    first = scene.outlet.last(StartGroup)
    assert (first.node, first.rendezvous, first.first_rank, first.local_ranks) == (0, "", 0, 1)
    scene.group.group_started(GroupStarted(1, "10.0.0.1:77"))
    second = scene.outlet.last(StartGroup)
    assert (second.node, second.rendezvous, second.first_rank, second.shares) == (1, "10.0.0.1:77", 1, [1, 1])
    scene.hello(0)
    scene.hello(1)
    assert [m for m in scene.outlet.sent if isinstance(m, WatchRanks)] == [
        WatchRanks(1, [70]),
        WatchRanks(1, [71]),
    ]


def test_a_group_is_cleared_when_every_host_has_nothing_left():
    """One host's word is not enough; one that is gone is not waited for."""
    scene = Scene(SETTINGS.replace(agents=2, rank_address="tcp://127.0.0.1:1"))
    scene.outlet.agents = {b"a", b"b"}
    several(scene)
    scene.group.tick(scene.now, None, 0)
    scene.group.group_started(GroupStarted(1, "10.0.0.1:77"))
    scene.hello(0)
    scene.hello(1)
    scene.group.rank_exited(RankExited(1, 1), scene.now)
    scene.group.tick(scene.now, None, 0)
    scene.group.group_exited(b"a", GroupExited(1, -9, ""), scene.now)
    assert scene.group.phase is Phase.CLEARING
    scene.group.group_exited(b"b", GroupExited(1, -9, ""), scene.now)
    assert scene.group.phase is Phase.IDLE


def test_a_lost_host_is_named_though_the_ranks_of_another_end_first():
    """A rank whose exchange broke ends its host's group at once; the host that was switched off is the reason."""
    scene = Scene(SETTINGS.replace(agents=2, rank_address="tcp://127.0.0.1:1"))
    scene.outlet.agents = {b"a", b"b"}
    several(scene)
    scene.group.tick(scene.now, None, 0)
    scene.group.group_started(GroupStarted(1, "10.0.0.1:77"))
    scene.hello(0)
    scene.hello(1)
    scene.group.rank_failed(RankFailed(1, 1, 1, "connection reset"), scene.now)
    scene.group.group_exited(b"b", GroupExited(1, 1, "connection reset"), scene.now)
    scene.outlet.agents = {b"b"}
    scene.now += 0.4
    scene.group.tick(scene.now, None, 0)
    assert scene.outlet.lost == ["the agent of a (pid 9) died, and rank 0 with it"]
    assert isinstance(scene.outlet.sent[-1], KillGroup)


def test_a_host_that_others_cannot_reach_is_named():
    """A loopback address beside a real one: nothing starts, and the reason says which host needs an address."""
    scene = Scene(SETTINGS.replace(agents=2, rank_address="tcp://127.0.0.1:1"))
    scene.outlet.agents = {b"a", b"b"}
    several(scene)
    scene.group.agent_hello(b"a", AgentHello(PROTOCOL_VERSION, 9, "a", "127.0.0.1"), scene.now)
    scene.group.tick(scene.now, None, 0)
    assert scene.group.phase is Phase.IDLE
    assert "cannot reach a: set engine.host_address" in scene.group.reason(scene.now)


def test_an_agent_that_cannot_be_reached_twice_is_dead():
    """Its ranks died with it, so the group is given up before anybody's silence has lasted long enough."""
    scene = Scene().run()
    scene.outlet.agents = set()
    for _ in range(3):
        scene.now += 0.5
        scene.group.tick(scene.now, None, 0)
    assert scene.outlet.lost == ["the agent of host (pid 9) died, and ranks 0 to 1 with it"]
