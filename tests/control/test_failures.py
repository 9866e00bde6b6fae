"""What happens when processes die, stop, hang or crash: a clear error, a fresh group, and never an orphan."""

import os
import signal
import stat
import subprocess
import sys
import uuid
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from dist_attn.control.controller import AGENT_STUCK_S
from dist_attn.control.launch import start_engine
from dist_attn.errors import ConfigError, EngineError
from dist_attn.wire.messages import RowSpec, SamplingSpec
from tests.support import fake_rank
from tests.support.controller_client import ControllerClient
from tests.support.engines import (
    ALERT,
    MARK,
    QUICK,
    processes_of,
    rank_processes,
    running_engine,
    wait_until_none_left,
)
from tests.support.source_path import SOURCE_PATH
from tests.support.waiting import eventually

BLOCK = 512
RECOVERY_S = 60


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """Two fake ranks that are lost and come back, test after test, and meet in folders of their own: (handle, client,
    mark).
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("meetings")))
        with running_engine(ranks=2, block_tokens=BLOCK) as running:
            patch.undo()
            yield running


@pytest.fixture(scope="module")
def alert_engine():
    """Two whose silence is noticed soon."""
    with running_engine(ranks=2, block_tokens=BLOCK, **ALERT) as running:
        yield running


@pytest.fixture(scope="module")
def patient_engine():
    """Two whose losses no request is failed for."""
    with running_engine(ranks=2, block_tokens=BLOCK, save_tokens=4 * BLOCK, losses_to_fail=9) as running:
        yield running


def meeting_folder(mark):
    """The private folder in which the ranks have met."""
    flags = Path(f"/proc/{rank_processes(mark)[0]}/cmdline").read_text().split("\0")
    (url,) = [flag for flag in flags if flag.startswith("--rendezvous=")]
    folder = Path(url.removeprefix("--rendezvous=file://")).parent
    assert folder.parent.name.startswith("meetings") and stat.S_IMODE(folder.stat().st_mode) == 0o700
    return folder


def next_epoch(client, before, timeout_s=RECOVERY_S):
    """Wait until the ranks after those of a status are ready; their status."""
    return client.wait_for_status(lambda status: status.ready and status.epoch == before.epoch + 1, timeout_s)


def fails_by(client, name, token, rank):
    """Open an encoding in which `rank` of two meets `token`; the failure."""
    tokens = np.zeros(2 * BLOCK, dtype=np.int64)
    tokens[rank * BLOCK] = token
    client.open_encoding(name)
    client.feed(name, tokens)
    client.wait_until(lambda: client.requests[name].ended, what=f"the end of {name}")
    return client.requests[name].failed


def test_a_killed_rank_fails_what_it_held_and_a_fresh_group_goes_on(engine):
    """The error names the rank, the next epoch meets elsewhere and serves, and nothing of the old one is left."""
    _, client, mark = engine
    for rank in (0, 1):
        status = client.status()
        before, folder = [status.pid for status in status.ranks], meeting_folder(mark)
        failed = fails_by(client, f"held{rank}", fake_rank.DIE, rank)
        assert failed.code == "engine_failed"
        assert f"rank {rank} (pid {before[rank]}) died" in failed.message
        status = next_epoch(client, status)
        assert client.encode(f"after{rank}", np.arange(900)).done.rows == 2
        assert sorted(r.pid for r in status.ranks) == rank_processes(mark)
        assert not set(before) & set(rank_processes(mark))
        assert meeting_folder(mark) != folder and not folder.exists()


def test_a_request_that_every_rank_fails_at_ends_alone(engine):
    """The ranks agree on it and go on as they are; others beside it get all of their rows."""
    _, client, mark = engine
    pids, lost = rank_processes(mark), client.status().lost_groups
    bad = np.zeros(4 * BLOCK, dtype=np.int64)
    bad[::BLOCK] = fake_rank.FAULT
    for n in range(3):
        client.open_encoding(f"bad{n}")
        client.feed(f"bad{n}", bad)
        client.open_encoding(f"good{n}", RowSpec("window", 300))
        client.feed(f"good{n}", np.arange(3000) % 900)
    for n in range(3):
        client.wait_until(lambda n=n: client.requests[f"bad{n}"].ended, what="the failure")
        assert "asked to fail at a request" in client.requests[f"bad{n}"].failed.message
        assert client.finish(f"good{n}").done.rows == 10
    assert client.status().lost_groups == lost and rank_processes(mark) == pids


@pytest.mark.slow
def test_open_requests_survive_killed_ranks(patient_engine):
    """Rows and tokens are those of an undisturbed run, each once, though ranks are killed while they are made."""
    _, client, mark = patient_engine
    texts = {f"t{n}": np.arange(30_000 + n) % 900 for n in range(2)}
    slow = np.arange(9_000) % 900
    slow[::BLOCK] = fake_rank.SLOW
    lost = client.wait_ready().lost_groups
    for name, tokens in {**texts, "slow": slow}.items():
        client.open_encoding(name, RowSpec("window", 300))
        client.feed(name, tokens)
    client.open_completion("p", SamplingSpec(2_000, temperature=0.0))
    client.feed("p", [5] * 700)
    for kill in range(2):
        client.wait_until(lambda kill=kill: len(client.requests["p"].tokens) > 100 * (kill + 1), 60)
        before = client.status()
        os.kill(rank_processes(mark)[kill], signal.SIGKILL)
        next_epoch(client, before)
    for name in (*texts, "slow", "p"):
        assert client.finish(name).failed is None
    assert client.status().lost_groups == lost + 2
    for name, tokens in {**texts, "slow": slow}.items():
        hidden = fake_rank.fake_hidden(tokens, 0).astype(np.float64)
        edges = [*range(0, len(tokens), 300), len(tokens)]
        means = np.array([hidden[a:b].mean(0) for a, b in pairwise(edges)], dtype=np.float32)
        assert np.array_equal(client.requests[name].rows, means)
    drawn = client.requests["p"].tokens
    assert len(drawn) == 2_000 or client.requests["p"].finish_reason == "stop"
    assert all(after == fake_rank.fake_next(before) for before, after in pairwise([5, *drawn]))


def test_a_request_that_one_rank_fails_at_is_lost_with_the_group_once(patient_engine):
    """The other rank may wait for it in an exchange: the group is lost, and the request does not lose the next one."""
    _, client, _ = patient_engine
    lost = client.wait_ready().lost_groups
    client.open_encoding("good", RowSpec("window", 300))
    failed = fails_by(client, "bad", fake_rank.FAULT, 1)
    assert failed.code == "engine_failed" and "asked to fail at a request" in failed.message
    client.feed("good", np.arange(3000) % 900)
    assert client.finish("good").done.rows == 10
    assert client.status().lost_groups == lost + 1


@pytest.mark.slow
def test_a_rank_that_raises_hangs_or_is_stopped_is_named_and_replaced(alert_engine):
    """Its exception reaches the client; without progress the stall limit ends the epoch, without a sign the deadline of
    heartbeats.
    """
    _, client, mark = alert_engine
    before = client.status()
    failed = fails_by(client, "raises", fake_rank.RAISE, 1)
    assert "rank 1 failed: RuntimeError: the fake rank was asked to fail" in failed.message
    before = next_epoch(client, before)
    failed = fails_by(client, "hangs", fake_rank.HANG, 1)
    assert "rank 1 has made no progress" in failed.message
    before = next_epoch(client, before)
    victim = before.ranks[1].pid
    os.kill(victim, signal.SIGSTOP)
    status = client.wait_for_status(lambda status: not status.ready)
    assert "rank 1 has been silent" in status.reason
    next_epoch(client, before)
    assert not {rank.pid for rank in before.ranks} & set(rank_processes(mark))


@pytest.mark.slow
def test_requests_that_had_not_begun_survive_a_lost_group(engine):
    """A request whose tokens never reached a rank waits for the next group instead of failing."""
    _, client, _ = engine
    client.open_encoding("waiting")
    client.wait_until(lambda: client.requests["waiting"].accepted)
    fails_by(client, "fatal", fake_rank.DIE, 0)
    client.open_completion("new", SamplingSpec(3))
    client.feed("new", [1, 2, 3])
    client.feed("waiting", np.arange(700))
    assert client.finish("waiting").done.rows == 2
    assert len(client.finish("new").tokens) == 3


def test_a_killed_agent_takes_its_ranks_along_and_is_replaced(engine):
    """The ranks die with their agent, a new agent starts the next epoch and removes the folder in which they met."""
    _, client, mark = engine
    before, ranks, folder = client.wait_ready(), rank_processes(mark), meeting_folder(mark)
    (agent,) = processes_of(mark, "control agent")
    os.kill(agent, signal.SIGKILL)
    next_epoch(client, before)
    assert not set(ranks) & set(rank_processes(mark))
    assert meeting_folder(mark) != folder and not folder.exists()


@pytest.mark.slow
def test_a_stopped_agent_is_replaced_once_it_is_needed(alert_engine):
    """SIGSTOP: the ranks go on without it; when one of them falls silent too, it is named, and a new agent starts the
    next epoch.
    """
    _, client, mark = alert_engine
    before, ranks = client.wait_ready(), rank_processes(mark)
    (agent,) = processes_of(mark, "control agent")
    os.kill(agent, signal.SIGSTOP)
    assert client.encode("without agent", np.arange(900)).done.rows == 2
    os.kill(before.ranks[1].pid, signal.SIGSTOP)
    status = client.wait_for_status(lambda status: not status.ready)
    assert "rank 1 has been silent" in status.reason
    next_epoch(client, before, AGENT_STUCK_S + RECOVERY_S)
    assert agent not in processes_of(mark, "control agent")
    assert not set(ranks) & set(rank_processes(mark))


def test_an_address_has_one_controller(tmp_path, capfd):
    """A second one is refused, names the first, and takes nothing from it; kill -9 takes agent and ranks along, then
    the next may have its addresses, and its ranks serve the clients that stayed connected.
    """
    own = {"api_address": f"ipc://{tmp_path}/api", "rank_address": f"ipc://{tmp_path}/ranks"}
    with running_engine(ranks=2, **own) as (handle, client, mark):
        words = f"the controller with process id {handle.process.pid} does"
        for name, address in own.items():
            other = {"api_address": f"ipc://{tmp_path}/other", **QUICK, name: address, "stop_deadline_s": 0.1}
            with pytest.raises(EngineError, match="exit code 2 before it listened"):
                start_engine(**other)
            assert f"cannot listen on {address}: {words}" in capfd.readouterr().err
        assert client.encode("a", np.arange(900)).done.rows == 2
        os.kill(handle.process.pid, signal.SIGKILL)
        handle.process.wait(60)
        wait_until_none_left(mark)
        handle.restart()
        client.wait_ready()
        assert client.encode("after", np.arange(900)).done.rows == 2


@pytest.mark.slow
def test_no_process_survives_a_stopped_controller_for_long():
    """Ranks that hear nothing end by themselves; when the controller goes on, so does its work."""
    with running_engine(ranks=2, **ALERT) as (handle, client, mark):
        os.kill(handle.process.pid, signal.SIGSTOP)
        eventually(lambda: not rank_processes(mark), "the ranks to end")
        os.kill(handle.process.pid, signal.SIGCONT)
        status = client.wait_for_status(lambda status: status.ready and status.epoch >= 2, RECOVERY_S)
        assert sorted(rank.pid for rank in status.ranks) == rank_processes(mark)


@pytest.mark.slow
def test_no_process_survives_a_killed_parent():
    """Whoever starts an engine and is killed takes everything along."""
    mark = uuid.uuid4().hex
    program = (
        "from tests.support.engines import QUICK\n"
        "from dist_attn.control.launch import start_engine\n"
        "handle = start_engine(**{**QUICK, 'ranks': 2})\n"
        "print(handle.api_address, flush=True)\n"
        "input()\n"
    )
    root = Path(__file__).parents[2]
    environment = {**os.environ, MARK: mark, "PYTHONPATH": SOURCE_PATH}
    with subprocess.Popen(
        [sys.executable, "-c", program], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=root
    ) as parent:
        with ControllerClient(parent.stdout.readline().decode().strip()) as client:
            client.wait_ready()
        assert len(rank_processes(mark)) == 2
        parent.kill()
        parent.wait(60)
        wait_until_none_left(mark)


@pytest.mark.slow
def test_ranks_that_crash_at_their_start_open_the_circuit_until_they_do_not(tmp_path, monkeypatch):
    """After some crashes nothing is tried for a while, the reason says why, and it recovers when the cause is gone."""
    cause = tmp_path / "cause"
    cause.touch()
    monkeypatch.setenv("FAKE_RANK_CRASHES", str(cause))
    with running_engine(ranks=1, crashes_to_open=3, cool_down_s=2.0, wait=False) as (_, client, _):
        status = client.wait_for_status(lambda status: "again and again" in status.reason)
        assert not status.ready
        assert "the fake rank was asked to crash at its start" in status.reason
        client.open_encoding("a")
        cause.unlink()
        client.feed("a", np.arange(20))
        assert client.finish("a").done.rows == 1


@pytest.mark.slow
def test_requests_do_not_wait_for_ever_for_ranks(tmp_path, monkeypatch):
    """A request that no group could serve in time fails with the reason."""
    monkeypatch.setenv("FAKE_RANK_CRASHES", str(tmp_path))
    with running_engine(ranks=1, ready_deadline_s=0.5, wait=False) as (_, client, _):
        # However long a rank takes to start and crash: the reason is known before the request comes.
        client.wait_for_status(lambda status: "asked to crash" in status.reason)
        request = client.open_encoding("a")
        client.wait_until(lambda: request.ended)
        assert request.failed.code == "engine_not_ready"
        assert "asked to crash" in request.failed.message


@pytest.mark.slow
def test_a_rank_program_that_does_not_exist_is_reported():
    """The reason carries what the launcher said."""
    with running_engine(ranks=1, rank_command=("/no/such/program",), wait=False) as (_, client, _):
        status = client.wait_for_status(lambda status: "last failure" in status.reason)
        assert "/no/such/program" in status.reason


def test_an_address_that_cannot_be_used_is_reported_to_the_starter(tmp_path):
    """Settings are refused at once, an address that cannot be bound when the controller tries."""
    with pytest.raises(ConfigError):
        start_engine(**QUICK, api_address="nowhere")
    with pytest.raises(EngineError, match="exit code 2"):
        start_engine(**QUICK, api_address=f"ipc://{tmp_path}/missing/api")


def test_sigterm_ends_everything_cleanly_and_tells_open_requests(engine):
    """Exit code 0, an error on every open stream, no process left; this is the last that the engine does."""
    handle, client, mark = engine
    client.wait_ready()
    client.open_encoding("a")
    client.feed("a", np.arange(900), final=False)
    handle.process.terminate()
    client.wait_until(lambda: client.requests["a"].ended)
    assert client.requests["a"].failed.code == "stopping"
    assert handle.process.wait(60) == 0
    wait_until_none_left(mark)
