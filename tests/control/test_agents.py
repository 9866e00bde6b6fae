"""Ranks of one group under several agents: who starts what, who is waited for, what a lost host does."""

import os
import random
import signal
import time
from contextlib import ExitStack, suppress

import numpy as np
import psutil
import pytest
import zmq

from dist_attn.control.placement import shares_of
from dist_attn.wire.messages import RowSpec, SamplingSpec
from tests.support import fake_rank
from tests.support.agents import kill_family, running_agent
from tests.support.engines import marked_processes, processes_of, rank_processes, running_engine, wait_until_none_left
from tests.support.waiting import eventually


@pytest.fixture
def scene(tmp_path):
    """An engine of three ranks that waits for two agents, none of its own: (handle, client, mark, start an agent)."""
    address = f"ipc://{tmp_path}/r"
    fields = {"ranks": 3, "agents": 2, "local_agent": False, "losses_to_fail": 9}
    # The agents end before it is counted what is left, and as the controller tells them: it waits for none in vain.
    with running_engine(wait=False, rank_address=address, **fields) as (handle, client, mark), ExitStack() as stack:
        yield handle, client, mark, lambda name: stack.enter_context(running_agent(tmp_path, name, address, mark))
        handle.stop()


def slow_text(length):
    """Tokens over which the fake ranks take a while."""
    tokens = np.arange(length) % 900
    tokens[::512] = fake_rank.SLOW
    return tokens


@pytest.mark.parametrize(("ranks", "hosts", "shares"), [(4, 2, [2, 2]), (5, 3, [2, 2, 1]), (3, 3, [1, 1, 1])])
def test_shares_are_as_equal_as_can_be(ranks, hosts, shares):
    """Every host has a rank, the larger shares come first."""
    assert shares_of(ranks, hosts) == shares and sum(shares) == ranks


def test_a_group_starts_when_enough_agents_are_there(scene):
    """One agent of two is waited with, and the reason names it; both share the ranks, and a text is read by all."""
    _, client, mark, start = scene
    start("left")
    status = client.wait_for_status(lambda status: "left" in status.reason)
    assert "1 of 2 agents" in status.reason and rank_processes(mark) == []
    start("right")
    status = client.wait_ready()
    assert len(status.ranks) == 3
    parents = [psutil.Process(rank.pid).ppid() for rank in status.ranks]
    assert parents[0] == parents[1] != parents[2]
    tokens = np.arange(9000) % 900
    expected = fake_rank.fake_hidden(tokens, 0)[:300].mean(0, dtype=np.float64)
    np.testing.assert_array_equal(client.encode("a", tokens, RowSpec("window", 300)).rows[0], expected.astype("f4"))


def test_an_agent_that_is_signalled_until_it_is_gone_ends_as_after_the_first(tmp_path):
    """Exit code 0, also where signals still come when Python takes itself apart."""
    address = f"ipc://{tmp_path}/r"
    with (
        zmq.Context() as context,
        context.socket(zmq.ROUTER) as router,
        running_agent(tmp_path, "alone", address, "nobody") as program,
    ):
        router.bind(address)
        assert router.poll(60_000), program.output  # its hello, before which it has set its handlers
        deadline = time.monotonic() + 60
        while program.process.poll() is None and time.monotonic() < deadline:
            program.process.send_signal(signal.SIGTERM)
            time.sleep(0.001)
        assert program.process.returncode == 0, program.output


@pytest.mark.slow
def test_a_host_that_is_lost_is_named_and_comes_back_or_is_replaced(scene):
    """Agent and ranks of a host die at once: the reason names its agent; when it is back, open streams go on, and
    a newcomer takes the place of the next that is lost.
    """
    _, client, mark, start = scene
    programs = {name: start(name) for name in ("left", "right")}
    client.wait_ready()
    lost, text = "left", slow_text(60_000)
    client.open_encoding("e", RowSpec("window", 500))
    client.feed("e", text[:30_000], final=False)
    kill_family(programs[lost])
    status = client.wait_for_status(lambda status: "1 of 2 agents" in status.reason)
    assert f"agent of {lost} (pid {programs[lost].process.pid}) died" in status.reason
    assert rank_processes(mark) == []
    start(lost)
    client.feed("e", text[30_000:], start=30_000)
    rows = client.finish("e", 60).rows
    hidden = fake_rank.fake_hidden(text, 0).astype(np.float64).reshape(120, 500, -1)
    np.testing.assert_array_equal(rows, hidden.mean(1).astype("f4"))
    assert client.status().epoch == 2
    start("newcomer")
    kill_family(programs["right"])
    status = client.wait_for_status(lambda status: status.ready and status.epoch == 3)
    assert status.lost_groups == 2
    assert len(client.complete("c", [1, 2, 3], SamplingSpec(3)).tokens) == 3


@pytest.mark.slow
def test_an_agent_of_its_own_waits_for_the_next_controller(tmp_path):
    """When the controller is killed the ranks end and the agent stays; the next controller's group is complete."""
    address = f"ipc://{tmp_path}/r"
    with ExitStack() as stack:
        with running_engine(wait=False, rank_address=address, local_agent=False) as (handle, client, mark):
            agent = stack.enter_context(running_agent(tmp_path, "a", address, mark, silence_deadline_s=2.0))
            client.wait_ready()
            os.kill(handle.process.pid, signal.SIGKILL)
            agent.wait_for("silent for 2 s", 60)
            # It says so before it kills what it has.
            eventually(lambda: len(marked_processes(mark)) == 1, "only the agent")
            agent_mark = mark
            with running_engine(rank_address=address, local_agent=False) as (_, again, _):
                assert again.encode("b", np.arange(900)).done.rows == 2
            agent.stop()
        assert marked_processes(agent_mark) == {}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_no_process_is_left_whatever_dies_first(seed, tmp_path):
    """Controller, agents and ranks are killed in an order that is drawn: the rest end by themselves, or when told."""
    draw = random.Random(seed)
    address = f"ipc://{tmp_path}/r"
    fields = {"ranks": 4, "agents": 2, "local_agent": False}
    with running_engine(wait=False, rank_address=address, **fields) as (handle, client, mark), ExitStack() as stack:
        agents = [stack.enter_context(running_agent(tmp_path, name, address, mark)) for name in ("a", "b")]
        ranks = [rank.pid for rank in client.wait_ready().ranks]
        for pid in draw.sample([handle.process.pid, *(agent.process.pid for agent in agents), *ranks[1:3]], 4):
            with suppress(ProcessLookupError):  # it may have ended with one that was killed before it
                os.kill(pid, signal.SIGKILL)
        for process in (handle.process, *(agent.process for agent in agents)):
            process.terminate()
        wait_until_none_left(mark)
        assert processes_of(mark, "control") == []
