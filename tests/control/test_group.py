"""The life of a rank group on plain values: epochs, the rank that is named, back-off, the circuit."""

import random

import msgspec
import pytest

from dist_attn.control.group import Phase, RankGroup
from dist_attn.control.settings import ControlSettings
from dist_attn.wire.agent_messages import (
    AgentHello,
    GroupExited,
    KillGroup,
    RankExited,
    StartGroup,
    WatchRanks,
)
from dist_attn.wire.messages import PROTOCOL_VERSION
from dist_attn.wire.rank_messages import Heartbeat, LoadedModel, RankFailed, RankHello

SETTINGS = ControlSettings(
    api_address="ipc:///none",
    model="m",
    ranks=2,
    start_deadline_s=60,
    heartbeat_deadline_s=4,
    stall_limit_s=20,
    stable_s=60,
    crashes_to_open=3,
    cool_down_s=30,
    backoff_s=1,
    backoff_max_s=4,
)


class Recorder:
    """An outlet that remembers; `agents` are those that can be reached."""

    def __init__(self):
        self.agents, self.sent, self.lost, self.ready = {b"agent"}, [], [], []

    def to_agent(self, identity, message):
        self.sent.append(message)
        return identity in self.agents

    def group_ready(self, hello):
        self.ready.append(hello)

    def group_lost(self, reason):
        self.lost.append(reason)

    def last(self, kind):
        return [message for message in self.sent if isinstance(message, kind)][-1]


class Scene:
    """A group, its outlet and a clock."""

    def __init__(self, settings=SETTINGS):
        self.outlet = Recorder()
        self.group = RankGroup(settings, self.outlet)
        self.now = 100.0

    def agent(self, identity=b"agent"):
        self.group.agent_hello(identity, AgentHello(PROTOCOL_VERSION, 9, "host", "127.0.0.1"), self.now)

    def wait(self, seconds, beats=(0, 1), step_sent_at=None, step=0):
        """Let time pass in turns; the agent and the ranks in `beats` are heard meanwhile."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 0.5)
            self.agent()
            for rank in beats:
                self.group.heartbeat(Heartbeat(self.group.epoch, rank, 0, "prefill"), self.now)
            self.group.tick(self.now, step_sent_at, step)

    def hello(self, rank, **fields):
        hello = RankHello(PROTOCOL_VERSION, self.group.epoch, rank, 2, 70 + rank, LoadedModel("m", 4, 9))
        self.group.rank_hello(msgspec.structs.replace(hello, **fields), self.now)

    def run(self):
        """Bring the group to RUNNING."""
        for _ in range(200):
            if self.group.phase is Phase.STARTING:
                break
            self.wait(0.5, beats=())
        self.hello(0)
        self.hello(1)
        assert self.group.running
        return self

    def crash(self):
        """Lose rank 1 and clear what is left."""
        self.group.rank_exited(RankExited(self.group.epoch, 1), self.now)
        self.group.tick(self.now, None, 0)
        assert self.group.phase is Phase.CLEARING
        self.group.group_exited(b"agent", GroupExited(self.group.epoch, -9, ""), self.now)


def test_a_group_starts_when_there_is_an_agent_and_runs_when_every_rank_said_hello():
    """Epoch 1 is started through the agent; its ranks are watched from the moment that all are there."""
    scene = Scene()
    scene.group.tick(scene.now, None, 0)
    assert scene.group.phase is Phase.IDLE
    assert "no agent" in scene.group.reason(scene.now)
    scene.agent()
    scene.group.tick(scene.now, None, 0)
    start = scene.outlet.last(StartGroup)
    assert start == StartGroup(1, "", [2], 0, start.terms)
    assert (start.terms["ranks"], start.terms["backend"]) == (2, "auto") and "keys_dir" not in start.terms
    scene.hello(1)
    assert "1 of 2" in scene.group.reason(scene.now)
    scene.hello(0)
    assert scene.group.running
    assert scene.outlet.last(WatchRanks) == WatchRanks(1, [70, 71])
    assert len(scene.outlet.ready) == 1


def test_the_rank_that_died_is_named_not_the_one_that_complained():
    """A survivor reports its broken connection first; the death of the other one is the reason all the same."""
    scene = Scene().run()
    scene.group.rank_failed(RankFailed(1, 0, 5, "connection closed by peer"), scene.now)
    scene.group.tick(scene.now, None, 0)
    assert not scene.outlet.lost
    scene.group.rank_exited(RankExited(1, 1), scene.now)
    scene.group.tick(scene.now, None, 0)
    assert scene.outlet.lost == ["rank 1 (pid 71) died"]
    assert scene.outlet.last(KillGroup) == KillGroup(1, "")


def test_a_rank_that_reports_an_error_is_named_with_it():
    """When nobody died first, the report itself is the reason, after a moment for other evidence."""
    scene = Scene().run()
    scene.group.rank_failed(RankFailed(1, 0, 5, "ValueError: broken"), scene.now)
    scene.wait(1)
    assert "rank 0 failed: ValueError: broken" in scene.outlet.lost[0]


def test_a_rank_that_reports_an_error_at_its_start_is_the_last_failure():
    """What it could not start with is the reason while nothing runs."""
    scene = Scene()
    scene.agent()
    scene.group.tick(scene.now, None, 0)
    scene.hello(1)
    scene.group.rank_failed(RankFailed(1, 0, 5, "no model at /there"), scene.now)
    scene.wait(1)
    assert not scene.group.running and "no model at /there" in scene.group.reason(scene.now)


def test_a_silent_rank_is_named_within_its_deadline():
    """No heartbeat for longer than the deadline ends the epoch, and `reason` names the rank."""
    scene = Scene().run()
    scene.wait(3.5, beats=(0,))
    assert scene.group.running
    scene.wait(1, beats=(0,))
    assert scene.group.phase is Phase.CLEARING
    assert "rank 1" in scene.outlet.lost[0]
    assert "rank 1 has been silent" in scene.group.reason(scene.now)


def test_a_held_up_controller_blames_nobody():
    """After the controller itself stood still, silence is counted anew."""
    scene = Scene().run()
    scene.now += 60
    scene.group.forgive_silence(scene.now)
    scene.group.tick(scene.now, None, 0)
    assert scene.group.running


def test_a_rank_without_progress_in_a_step_is_named():
    """Heartbeats alone are not progress: the rank that stands still longest is named with its step."""
    scene = Scene().run()
    scene.group.ranks[0].finished(5, 0.1, scene.now)
    sent_at = scene.now
    scene.wait(19, step_sent_at=sent_at, step=5)
    assert scene.group.running
    scene.wait(2, step_sent_at=sent_at, step=5)
    assert "rank 1 has made no progress" in scene.outlet.lost[0]
    assert "step 5" in scene.outlet.lost[0]


def test_the_time_of_a_ranks_steps_adds_up():
    """A rank's status tells what all its steps have taken; no other rank's."""
    scene = Scene().run()
    for step, seconds in ((1, 0.25), (2, 0.5)):
        scene.group.ranks[0].finished(step, seconds, scene.now)
    assert [vitals.status(scene.now).busy for _, vitals in sorted(scene.group.ranks.items())][:2] == [0.75, 0.0]


def test_a_slow_step_is_not_a_stuck_one():
    """As long as progress is reported a step may take any time, and without a step nobody has to progress."""
    scene = Scene().run()
    sent_at = scene.now
    for progress in range(100):
        for rank in (0, 1):
            scene.group.heartbeat(Heartbeat(1, rank, 0, "prefill", progress), scene.now)
        scene.wait(1, step_sent_at=sent_at, step=1)
        scene.group.ranks[0].progress = scene.group.ranks[1].progress = progress
    assert scene.group.running
    scene.wait(100)
    assert scene.group.running


def test_ranks_that_do_not_load_in_time_are_named():
    """The start has a deadline."""
    scene = Scene()
    scene.wait(1, beats=())
    scene.hello(0)
    scene.wait(58)
    assert not scene.outlet.lost
    scene.wait(2)
    assert "rank 1 did not load within 60 s" in scene.outlet.lost[0]


@pytest.mark.parametrize("loaded", [(), (0,), (1,)], ids=["none", "another", "itself"])
@pytest.mark.parametrize("beaten", [False, True], ids=["from the start", "later"])
def test_a_rank_that_falls_silent_in_a_start_is_named(loaded, beaten):
    """It is not waited for until the deadline of the start, though the others beat, and the next epoch follows."""
    scene = Scene()
    scene.wait(1, beats=())
    for _ in range(3 if beaten else 0):
        scene.wait(14, beats=(0,))
        scene.group.heartbeat(Heartbeat(1, 1, 0, "loading"), scene.now)
    for rank in loaded:
        scene.hello(rank)
    scene.wait(14, beats=(0,))
    assert scene.group.phase is Phase.STARTING
    scene.wait(2, beats=(0,))
    assert scene.outlet.lost == ["rank 1 has been silent for 15.5 s while the ranks started"]
    scene.group.group_exited(b"agent", GroupExited(1, -9, ""), scene.now)
    scene.run()
    assert scene.group.epoch == 2


def test_a_held_up_controller_blames_nobody_in_a_start():
    """After the controller itself stood still, the silence of ranks that load is counted anew."""
    scene = Scene()
    scene.wait(1, beats=())
    scene.now += 30
    scene.group.forgive_silence(scene.now)
    scene.wait(14, beats=())
    assert scene.group.phase is Phase.STARTING


@pytest.mark.parametrize("seed", range(30))
def test_a_stopped_rank_keeps_the_engine_away_for_a_bounded_time(seed):
    """Whenever one is stopped, before its first sign of life, while it loads or later, its group does not stay."""
    rnd = random.Random(seed)
    scene = Scene(SETTINGS.replace(crashes_to_open=1000))
    for epoch in range(1, 9):
        while scene.group.epoch < epoch:
            scene.wait(0.5, beats=())
        began, loads = scene.now, [rnd.uniform(0, 50) for _ in range(2)]
        stops, hellos = [rnd.uniform(0, 60), rnd.uniform(0, 120)], set()
        while scene.group.phase in (Phase.STARTING, Phase.RUNNING):
            age = scene.now - began
            for rank in {rank for rank in (0, 1) if loads[rank] <= age < stops[rank]} - hellos:
                scene.hello(rank)
                hellos.add(rank)
            scene.wait(0.5, beats=[rank for rank in (0, 1) if age < stops[rank]])
            assert age <= min(stops) + 20, (
                "15 s of silence end a start, 4 s more a group that has become ready meanwhile"
            )
        scene.group.group_exited(b"agent", GroupExited(epoch, -9, ""), scene.now)
    assert len(scene.outlet.lost) == 8


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"model": LoadedModel("m", 4, 8)}, "another model"),
        ({"model": LoadedModel("m", 4, 9, device="cuda:0", chunk_tokens=2048)}, "rank 1 (cuda:0) cuts blocks of 2048"),
        ({"size": 3}, "needed"),
        ({"protocol_version": 99}, "needed"),
        ({"rank": 2}, "rank 2 has (protocol, ranks)"),
    ],
)
def test_ranks_that_do_not_fit_together_are_refused(fields, reason):
    """Another model, length of blocks, group size or protocol ends the epoch before any work is given to it."""
    scene = Scene()
    scene.wait(1, beats=())
    scene.hello(0)
    scene.hello(**{"rank": 1, **fields})
    assert reason in scene.outlet.lost[0]


def test_the_first_crash_starts_again_at_once_and_later_ones_wait_longer():
    """Back-off doubles from crash to crash."""
    scene = Scene().run()
    waits = []
    for _ in range(2):
        scene.crash()
        crashed_at = scene.now
        scene.run()
        waits.append(scene.now - crashed_at)
    assert waits[0] <= 0.5
    assert waits[1] >= 1


def test_crashes_in_a_row_open_the_circuit_and_a_stable_group_closes_it():
    """After crashes_to_open crashes within stable_s nothing starts for the cool-down, and the reason says so."""
    scene = Scene().run()
    scene.crash()
    scene.run().crash()
    scene.run().crash()
    assert scene.group.circuit_open
    assert "again and again" in scene.group.reason(scene.now)
    epoch = scene.group.epoch
    scene.wait(29, beats=())
    assert (scene.group.epoch, scene.group.phase) == (epoch, Phase.IDLE)
    scene.wait(2, beats=())
    assert scene.group.epoch == epoch + 1
    scene.run()
    scene.wait(59.5)
    assert scene.group.circuit_open
    scene.wait(0.5)
    assert not scene.group.circuit_open


def test_crashes_that_lie_apart_open_no_circuit():
    """As many crashes as open the circuit do not where the first is longer ago than stable_s; within that they do."""
    scene = Scene().run()
    scene.crash()
    first = scene.now
    scene.run().wait(55)
    scene.crash()
    second = scene.now
    scene.run().wait(first + 60.5 - scene.now)
    scene.crash()
    assert not scene.group.circuit_open
    scene.run().wait(second + 60 - scene.now)
    scene.crash()
    assert scene.group.circuit_open


def test_crashes_before_a_useful_group_do_not_count():
    """Two crashes, a group that was of use, and two more open no circuit, and the wait between them begins anew."""
    scene = Scene().run()
    for useful in (False, False, True, False):
        if useful:
            scene.group.was_of_use()
        scene.crash()
        crashed_at = scene.now
        scene.run()
    assert scene.now - crashed_at <= 1.5
    scene.crash()
    assert not scene.group.circuit_open
    scene.run().crash()
    assert scene.group.circuit_open


def test_a_group_that_was_of_use_is_followed_at_once_and_opens_no_circuit():
    """Where requests came further before each crash, however many, the next group starts without waiting."""
    scene = Scene().run()
    for _ in range(8):
        scene.group.was_of_use()
        scene.crash()
        crashed_at = scene.now
        scene.run()
        assert scene.now - crashed_at <= 0.5
        assert not scene.group.circuit_open
    scene.crash()
    scene.run().crash()
    scene.run().crash()
    assert scene.group.circuit_open


def test_messages_of_an_old_epoch_change_nothing():
    """What is said about epoch 1 does not touch epoch 2."""
    scene = Scene().run()
    scene.crash()
    scene.run()
    scene.group.rank_exited(RankExited(1, 0), scene.now)
    scene.group.group_exited(b"agent", GroupExited(1, 1, ""), scene.now)
    scene.wait(1)
    assert scene.group.running
    assert scene.group.epoch == 2


def test_a_launcher_that_ends_by_itself_ends_the_epoch():
    """Its exit code and its last line are in the reason."""
    scene = Scene()
    scene.wait(1, beats=())
    scene.group.group_exited(b"agent", GroupExited(1, 17, "first\nno such model\n"), scene.now)
    assert "exit code 17: no such model" in scene.outlet.lost[0]
    assert scene.group.phase is Phase.IDLE


@pytest.mark.parametrize(("code", "words"), [(-9, "killed by SIGKILL"), (-200, "killed by signal 200")])
def test_a_launcher_that_was_killed_is_said_to_be(code, words):
    """What the ranks happened to print last is not given as the reason."""
    scene = Scene().run()
    scene.group.group_exited(b"agent", GroupExited(1, code, "a warning of long ago\n"), scene.now)
    assert words in scene.outlet.lost[0]
    assert "warning" not in scene.outlet.lost[0]


WHY = "out of memory: the kernel killed a process here"


def test_what_a_host_knows_of_the_cause_is_told_once():
    """What an agent says of a rank's or a launcher's end is in the reason, once where both say it."""
    running = Scene().run()
    running.group.rank_exited(RankExited(1, 1, WHY), running.now)
    running.group.group_exited(b"agent", GroupExited(1, -9, "", WHY), running.now)
    starting = Scene()
    starting.wait(1, beats=())
    starting.group.group_exited(b"agent", GroupExited(1, -9, "", WHY), starting.now)
    assert running.outlet.lost == [f"rank 1 (pid 71) died, {WHY} (killed by SIGKILL)"]
    assert starting.outlet.lost == [f"the ranks ended (killed by SIGKILL), {WHY}"]


def test_an_agent_that_died_is_replaced_and_its_ranks_are_given_up():
    """A second agent waits while the first can be reached, and takes over when it cannot."""
    scene = Scene().run()
    scene.agent(b"other")
    assert scene.group.running
    scene.outlet.agents = {b"other"}
    scene.agent(b"other")
    assert "agent" in scene.outlet.lost[0]
    scene.group.group_exited(b"other", GroupExited(1, -9, ""), scene.now)
    scene.group.tick(scene.now, None, 0)
    assert scene.group.epoch == 2


def test_a_stopping_group_starts_nothing_and_counts_no_crash():
    """When the engine ends, the end of its ranks is no failure."""
    scene = Scene().run()
    scene.group.stop()
    scene.group.rank_exited(RankExited(1, 0), scene.now)
    scene.group.group_exited(b"agent", GroupExited(1, 0, ""), scene.now)
    scene.wait(5, beats=())
    assert not scene.outlet.lost
    assert scene.group.phase is Phase.IDLE
