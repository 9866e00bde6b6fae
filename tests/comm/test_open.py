"""open_communicator: alone, under torchrun's or mpiexec's environment, and when none fits."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from dist_attn.comm import Rendezvous, open_communicator
from dist_attn.errors import CommError, ConfigError, MissingExtraError
from dist_attn.launchers import LOOPBACK_INTERFACE

VARIABLES = (
    "WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "PMI_RANK", "PMI_SIZE", "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE", "PMIX_RANK",
)  # fmt: skip


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test starts from an environment without ranks."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.mark.parametrize("backend", [None, "local"])
def test_alone_is_local(backend: str | None) -> None:
    """A process started by itself is a group of one."""
    with open_communicator(backend) as comm:
        assert (comm.rank, comm.size, comm.backend) == (0, 1, "local")


def test_one_rank_of_torchrun_is_local(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank under torchrun needs no process group."""
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert open_communicator().backend == "local"


def test_one_rank_of_mpiexec_is_local(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank under mpiexec needs no MPI."""
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("PMI_SIZE", "1")
    assert open_communicator().backend == "local"


@pytest.mark.parametrize(
    ("backend", "environment"),
    [
        (None, {"PMI_RANK": "1", "PMI_SIZE": "4"}),
        (None, {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}),
        (None, {"PMIX_RANK": "0"}),
        ("mpi", {}),
    ],
)
def test_mpiexec_or_a_wish_means_mpi_and_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, backend: str | None, environment: dict[str, str]
) -> None:
    """Whatever mpiexec started joins by MPI; without mpi4py, one line names the extra that brings it."""
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(MissingExtraError, match=r"^[^\n]*pip install -e '\.\[mpi\]'$"):
        open_communicator(backend)


JOIN = """
import os, sys, psutil, torch, torch.distributed as dist
from dist_attn.comm import Rendezvous, open_communicator
from dist_attn.errors import ConfigError
device, meeting, loopback, listener, *places = sys.argv[1:]
try:
    open_communicator(device=device, rendezvous=Rendezvous(meeting, 60.0))
except ConfigError as error:
    print(error)
for url in places:
    if url:  # whoever says where to meet says the interface too, and nothing is left of torchrun
        os.environ["GLOO_SOCKET_IFNAME"] = loopback
        for name in ("LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)
    given = [int(listener)] if listener and url == places[-1] else []
    rendezvous = Rendezvous(url, 60.0, *given) if url else None
    with open_communicator(timeout_s=60, rendezvous=rendezvous) as comm:
        with comm.split(0) as part:
            print(comm.backend, comm.size, int(part.all_reduce_sum(torch.tensor(comm.rank + 1))), end=" ")
        listening = {c.laddr.ip for c in psutil.Process().net_connections("inet") if c.status == "LISTEN"}
    assert not dist.is_initialized()
    print("listens on", *listening)
"""


@pytest.mark.slow
def test_ranks_join_over_gloo(tmp_path: Path) -> None:
    """Processes with torchrun's environment, or told where to meet, find each other, and a group they opened is gone
    after close; they listen on the address where they meet alone, and where they compute on different kinds of devices
    all hear it before a group is made.
    """
    listener, command = socket.create_server(("127.0.0.1", 0)), [sys.executable, "-c", JOIN]
    meeting = (tmp_path / "refused").as_uri()
    ports = free_port(), listener.getsockname()[1]
    # By torchrun's variables, by a file, at an address, and at one whose socket the first rank was given.
    places = ["", (tmp_path / "sto re").as_uri(), *(f"tcp://127.0.0.1:{port}" for port in ports)]
    given = str(listener.fileno())
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [*command, ("meta", "cpu")[rank], meeting, LOOPBACK_INTERFACE, given if rank == 0 else "", *places],
            env=os.environ | shared | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=() if rank else [listener.fileno()],
        )
        for rank in range(2)
    ]
    listener.close()
    try:
        outputs = [rank.communicate(timeout=90)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0]
    refusals, joined = zip(*(output.split("\n", 1) for output in outputs), strict=True)
    refusal = "ranks compute on different devices, rank 0 on meta, rank 1 on cpu: give each a GPU"
    assert all(refusal in said for said in refusals)
    assert joined == 2 * (len(places) * "gloo 2 3 listens on 127.0.0.1\n",)


def test_ranks_that_never_come_are_a_comm_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Joining a group has a deadline, too."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    with pytest.raises(CommError, match="rank 0 of 2 did not meet all other ranks where torchrun says"):
        open_communicator(timeout_s=1.0)


def test_ranks_that_never_come_to_a_rendezvous_are_a_comm_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """So has meeting, and what is no place to meet is refused."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(CommError, match="rank 0 of 2 did not meet all other ranks at file:"):
        open_communicator(rendezvous=Rendezvous((tmp_path / "store").as_uri(), 1.0))
    with pytest.raises(ConfigError, match="give file:///PATH or tcp://HOST:PORT"):
        open_communicator(rendezvous=Rendezvous("10.0.0.1:4567", 1.0))


@pytest.mark.parametrize(
    ("backend", "environment", "says"),
    [
        ("ucx", {}, "choose one of auto, local, gloo, nccl, mpi"),
        ("gloo", {}, "torchrun"),
        (None, {"WORLD_SIZE": "2"}, "needs RANK, MASTER_ADDR, MASTER_PORT"),
        (None, {"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two'"),
        (None, {"WORLD_SIZE": "0"}, "1 or more"),
        ("local", {"WORLD_SIZE": "4"}, "4 were started"),
        ("local", {"PMI_RANK": "0", "PMI_SIZE": "4"}, "4 were started"),
        ("gloo", {"PMI_RANK": "0", "PMI_SIZE": "4"}, "torchrun"),
        (None, {"PMI_RANK": "0", "PMI_SIZE": "many"}, "PMI_SIZE is 'many'"),
    ],
)
def test_what_does_not_fit_is_a_config_error(
    monkeypatch: pytest.MonkeyPatch, backend: str | None, environment: dict[str, str], says: str
) -> None:
    """A back end that does not fit how the process was started is refused with what to do instead."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=says):
        open_communicator(backend)


def test_a_wait_needs_a_deadline() -> None:
    """A deadline of zero seconds is refused."""
    with pytest.raises(ConfigError, match="more than 0 seconds"):
        open_communicator(timeout_s=0)
