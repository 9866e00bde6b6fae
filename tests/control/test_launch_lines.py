"""What an agent starts its ranks with: one by one or by mpiexec, over several hosts, and on which interface."""

import os
import socket
import subprocess
import sys

import pytest

from dist_attn import host_limits
from dist_attn.control.processes import GROUP_MARK, group_mark, group_processes, kill_processes
from dist_attn.control.ranks import (
    LOOPBACK_INTERFACE,
    RankProcesses,
    address_towards,
    interface_of,
    launch_command,
    listen_on,
)
from dist_attn.control.settings import ControlSettings
from dist_attn.errors import ConfigError
from dist_attn.rank_link.rank_settings import RankSettings
from dist_attn.shipped import resolve_model_folder
from dist_attn.wire.agent_messages import StartGroup
from tests.support.waiting import eventually

SETTINGS = ControlSettings(model="/models/here", rank_address="tcp://127.0.0.1:9", keys_dir="/keys", agent_name="b")


def line(shares, node=0, backend="gloo", rendezvous=""):
    """The command without its tether."""
    start = StartGroup(7, "e", shares, node, {"backend": backend, "ranks": sum(shares)})
    command = launch_command(SETTINGS, start, rendezvous)
    return command[command.index(str(os.getpid())) + 1 :]


def test_ranks_are_told_this_hosts_places():
    """Model, keys and the way to the controller are the agent's; the rest is what the controller said."""
    command = line([2, 1], 1, rendezvous="tcp://10.0.0.1:4567")
    own = command[command.index("dist_attn.rank") + 1 :]
    os.environ["RANK"], os.environ["WORLD_SIZE"] = "2", "3"
    try:
        rank = RankSettings.from_flags(own)
    finally:
        del os.environ["RANK"], os.environ["WORLD_SIZE"]
    assert (rank.controller, rank.model, rank.keys_dir) == ("tcp://127.0.0.1:9", "/models/here", "/keys")
    assert (rank.engine, rank.epoch, rank.ranks, rank.rank) == ("e", 7, 3, 2)
    assert (rank.rendezvous, rank.listener) == ("tcp://10.0.0.1:4567", None)


@pytest.mark.parametrize(
    ("ranks", "backend", "starts_by"), [(1, "mpi", None), (2, "gloo", None), (2, "nccl", None), (2, "mpi", "2")]
)
def test_who_starts_the_ranks(ranks, backend, starts_by):
    """The agent does, but where there are several over MPI: then mpiexec starts so many."""
    command = line([ranks], backend=backend)
    launcher = command[: command.index(sys.executable)]
    assert launcher[1:] == ([] if starts_by is None else ["-n", starts_by])


@pytest.mark.parametrize(
    ("given", "threads", "waits"), [({}, "2", "passive"), ({"OMP_WAIT_POLICY": "active"}, "2", "active")]
)
def test_ranks_share_the_cores_and_sleep_while_they_wait(given, threads, waits, monkeypatch):
    """Each of two ranks is started with half of the cores and passive waiting, unless the user has said otherwise."""
    monkeypatch.setattr(host_limits, "usable_cores", lambda: 5)
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, word in given.items():
        monkeypatch.setenv(name, word)
    settings = SETTINGS.replace(rank_command=("sh", "-c", 'echo "rank $RANK: $OMP_NUM_THREADS $OMP_WAIT_POLICY"'))
    start = StartGroup(7, "e", [2], 0, {"backend": "gloo", "ranks": 2})
    group = RankProcesses(settings, start, "127.0.0.1")
    try:
        eventually(lambda: group.exit_code() is not None, "the ranks end")
    finally:
        _, printed = group.kill()
    assert sorted(printed.splitlines()) == [f"rank {rank}: {threads} {waits}" for rank in (0, 1)]


def test_a_killed_rank_is_told_with_what_it_needs():
    """The end of a rank by SIGKILL carries the memory that a rank of its model needs; an end of its own does not."""
    model = str(resolve_model_folder("books-6m"))
    for script, words in (("kill -9 $$", "out of memory; a rank needs about 37"), ("exit 1", "")):
        settings = SETTINGS.replace(model=model, rank_command=("sh", "-c", script))
        start = StartGroup(7, "e", [1], 0, {"backend": "local", "ranks": 1})
        group = RankProcesses(settings, start, "127.0.0.1")
        try:
            eventually(lambda group=group: group.exit_code() is not None, "the rank ends")
            for why in (group.why_ended(), group.why_ended(*group.process_ids)):
                assert words in why
                assert bool(why) == bool(words)
        finally:
            group.kill()


def test_a_host_knows_its_own_address():
    """The address is that of the way to the controller, its interface has a name, a socket listens there alone."""
    assert address_towards("tcp://127.0.0.1:5") == address_towards("ipc:///x") == "127.0.0.1"
    assert address_towards("tcp://no such host:5") == ""
    assert interface_of("127.0.0.1") in [name for _, name in socket.if_nameindex()]
    assert interface_of("203.0.113.9") == ""
    assert interface_of("127.0.0.1") == LOOPBACK_INTERFACE
    with listen_on("127.0.0.1") as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


@pytest.mark.parametrize("address", ["", "0.0.0.0"])
def test_ranks_never_meet_on_all_addresses(address):
    """A host whose own address is not known opens nothing, and the words say which setting is missing."""
    with pytest.raises(OSError, match=r"set engine\.host_address"):
        listen_on(address)


def test_only_the_processes_of_a_mark_are_killed():
    """Those of another engine, agent or epoch on the same machine are left alone."""
    engine = f"test-{os.getpid()}"
    others = [group_mark(engine, "ab", 1), group_mark(f"{engine}b", "a", 1)]
    marks = [group_mark(engine, "a", 1), group_mark(engine, "a", 11), *others]
    sleepers = [subprocess.Popen(["sleep", "60"], env={GROUP_MARK: mark}) for mark in marks]
    try:
        first, later, *left = [{sleeper.pid} for sleeper in sleepers]
        # Linux shows the variables of a program a moment after it has begun.
        eventually(lambda: [group_processes(mark) for mark in marks] == [first, later, *left], "the variables of all")
        assert group_processes(group_mark(engine, "a")) == first | later
        assert kill_processes(marks[0], 5.0) == set()
        assert [group_processes(mark) for mark in marks] == [set(), later, *left]
        assert kill_processes(group_mark(engine, "a"), 5.0) == set()
        assert [group_processes(mark) for mark in marks] == [set(), set(), *left]
    finally:
        for sleeper in sleepers:
            sleeper.kill()
            sleeper.wait()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"agents": 2}, "every agent needs a rank"),
        ({"agents": 2, "ranks": 2}, "rank_address is not set"),
        ({"agents": 2, "ranks": 2, "rank_address": "tcp://127.0.0.1:1", "backend": "mpi"}, "over mpi are of one host"),
        ({"agent_name": "a:b"}, "agent_name"),
    ],
)
def test_settings_of_several_hosts_that_do_not_fit_are_refused(fields, words):
    """What is missing is said before anything starts."""
    with pytest.raises(ConfigError, match=words):
        ControlSettings(model="m", **fields)
