"""MPI in particular: ranks that differ, leave, hang or die; messages in pieces; what is not installed."""

import contextlib
import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from dist_attn.comm import Communicator, differentiable, mpi_library
from dist_attn.comm.mpi import MpiCommunicator
from dist_attn.errors import CommError
from dist_attn.launchers import find_mpiexec
from tests.support.command_line import run_here
from tests.support.models import write_small_folder
from tests.support.mpi import finish, kill_family, run_mpi, start_under_mpiexec
from tests.support.tokenisers import PROSE

pytestmark = pytest.mark.mpi

DEADLINE_S = 90.0


def fails_in_many_ways(healthy: Communicator) -> dict[str, str]:
    """One group after the other breaks, each in its own way; what this rank was told, by the way it broke."""
    ways: tuple[Callable[..., None], ...] = (
        is_late,
        calls_something_else,
        expects_other_rows,
        raises_by_itself,
        closes_early,
        scans_late,
        scans_something_else,
        gathers_while_others_scan,
        raises_while_others_scan,
        cannot_combine,
    )
    groups = [MpiCommunicator.connect(timeout_s=60.0) for _ in ways]
    said = {"in pieces": str(gathers_in_pieces(healthy))}
    for way, comm in zip(ways, groups, strict=True):
        try:
            with comm:
                comm.barrier()
                if way in (is_late, scans_late):
                    way(comm, healthy)
                else:
                    way(comm)
        except (CommError, KeyError, ArithmeticError) as error:
            said[way.__name__] = f"{type(error).__name__}: {error}"
    healthy.barrier()
    return said


def gathers_in_pieces(comm: Communicator) -> bool:
    """More bytes than go into one message, forward and backward."""
    before, mpi_library.PIECE_BYTES = mpi_library.PIECE_BYTES, 1000
    try:
        x = (torch.arange(3001.0) + comm.rank).requires_grad_()
        gathered = differentiable.all_gather(comm, x)
        (grad,) = torch.autograd.grad(gathered.sum() * (comm.rank + 1), x)
    finally:
        mpi_library.PIECE_BYTES = before
    whole = torch.stack([torch.arange(3001.0) + rank for rank in range(comm.size)])
    return torch.equal(gathered, whole) and torch.equal(grad, torch.full_like(x, sum(range(1, comm.size + 1))))


def is_late(comm: Communicator, healthy: Communicator) -> None:
    """Rank 1 comes after the deadline, when all it needs may have arrived; from then on the group is of no use."""
    comm.timeout_s = 0.6
    if comm.rank != 1:
        with pytest.raises(CommError) as late:
            comm.all_gather(torch.zeros(2), label="carry")
        with pytest.raises(CommError, match=r"cannot do barrier\(\): all_gather"):
            comm.barrier()
        comm.close()
        healthy.barrier()
        raise late.value
    healthy.barrier()
    comm.all_gather(torch.zeros(2), label="carry")
    comm.barrier()


def calls_something_else(comm: Communicator) -> None:
    """Rank 1 gathers another shape."""
    comm.timeout_s = 1.0
    comm.all_gather(torch.zeros(3 if comm.rank == 1 else 2))


def expects_other_rows(comm: Communicator) -> None:
    """Rank 1 expects more rows from rank 0 than are sent."""
    receive = [2, 1, 1] if comm.rank == 1 else [1, 1, 1]
    comm.all_to_all(torch.zeros(3, 4), [1, 1, 1], receive)
    comm.barrier()


def raises_by_itself(comm: Communicator) -> None:
    """Rank 1 leaves with an exception of its own."""
    if comm.rank == 1:
        raise KeyError("the real one")
    comm.all_reduce_sum(torch.zeros(2), label="loss")


def closes_early(comm: Communicator) -> None:
    """Rank 1 is done before the others."""
    if comm.rank == 1:
        comm.close()
    else:
        comm.barrier()


def scan(comm: Communicator, *shape: int) -> None:
    """A scan of ones, as the carries are scanned."""
    comm.exclusive_scan_start(torch.ones(shape), torch.add, label="carry").wait()


def scans_late(comm: Communicator, healthy: Communicator) -> None:
    """Rank 1 comes to a scan after the deadline of the others."""
    comm.timeout_s = 0.6
    if comm.rank != 1:
        with pytest.raises(CommError) as late:
            scan(comm, 2)
            comm.barrier()
        comm.close()
        healthy.barrier()
        raise late.value
    healthy.barrier()
    scan(comm, 2)
    comm.barrier()


def scans_something_else(comm: Communicator) -> None:
    """Rank 1 scans more numbers than the others, which MPI cannot be told."""
    comm.timeout_s = 1.0
    scan(comm, 30_000 if comm.rank == 1 else 2)


def gathers_while_others_scan(comm: Communicator) -> None:
    """Rank 1 makes another exchange."""
    comm.timeout_s = 1.0
    if comm.rank == 1:
        comm.all_gather(torch.zeros(2))
    scan(comm, 2)


def raises_while_others_scan(comm: Communicator) -> None:
    """Rank 1 leaves with an exception of its own."""
    if comm.rank == 1:
        raise KeyError("the real one")
    scan(comm, 2)


def cannot_combine(comm: Communicator) -> None:
    """The operator fails, inside of MPI."""

    def fails(earlier: torch.Tensor, later: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("no sum")

    comm.timeout_s = 1.0
    comm.exclusive_scan_start(torch.ones(2), fails).wait()
    comm.barrier()


def test_every_failure_is_named() -> None:
    """Whoever is late, differs or leaves is named with the exchange, by its reason where there is one."""
    outcomes = run_mpi(fails_in_many_ways, 3)
    assert all(isinstance(outcome, dict) for outcome in outcomes), outcomes
    zero, one, two = outcomes
    assert {outcome["in pieces"] for outcome in outcomes} == {"True"}
    late = r"for carry failed: waited \d\.\d s for rank (0, )?1(, 2)?; it died, hangs or is late"
    assert re.search(late, zero["is_late"] + two["is_late"])
    assert "the group has failed" in one["is_late"]
    for said in (zero, two):
        assert said["calls_something_else"].startswith("MismatchError: rank ")
        assert "all_gather(float32[2]) failed" in said["calls_something_else"]
        assert "rank 1 called something else" in said["calls_something_else"]
    assert one["expects_other_rows"].startswith("MismatchError: rank 1 of 3 (mpi): all_to_all(float32[any, 4]) failed")
    assert "rank 0 sent 16 bytes where 32 were expected" in one["expects_other_rows"]
    assert "rank 0 sent 16 bytes" in zero["expects_other_rows"]
    assert one["raises_by_itself"] == "KeyError: 'the real one'"
    for said in (zero, two):
        assert "all_reduce_sum(float32[2]) for loss failed" in said["raises_by_itself"]
        assert "rank 1 left with KeyError: 'the real one'" in said["raises_by_itself"]
        assert "rank 1 has closed its communicator" in said["closes_early"]
        for way in ("scans_something_else", "gathers_while_others_scan"):
            assert said[way].startswith("MismatchError: rank "), said[way]
            assert "exclusive_scan(float32[2]) for carry failed" in said[way]
            assert "rank 1 called something else" in said[way]
        assert "exclusive_scan(float32[2]) for carry failed" in said["raises_while_others_scan"]
        assert "rank 1 left with KeyError: 'the real one'" in said["raises_while_others_scan"]
    assert re.search(late, zero["scans_late"] + two["scans_late"])
    assert "exclusive_scan(float32[2]) for carry failed" in zero["scans_late"] + two["scans_late"]
    assert "the group has failed" in one["scans_late"]
    assert any(outcome["cannot_combine"] == "ArithmeticError: no sum" for outcome in outcomes)
    assert all("cannot_combine" in outcome for outcome in outcomes)


def gathers_on_a_gpu(comm: Communicator) -> bool:
    """Tensors that live on a GPU come back there, with their gradients."""
    x = torch.full((5,), float(comm.rank), device="cuda", requires_grad=True)
    gathered = differentiable.all_gather(comm, x)
    (grad,) = torch.autograd.grad(gathered.sum(), x)
    want = torch.arange(float(comm.size)).repeat_interleave(5).reshape(-1, 5)
    return gathered.is_cuda and torch.equal(gathered.cpu(), want) and bool((grad == comm.size).all())


@pytest.mark.gpu
def test_tensors_on_a_gpu_go_through_the_host() -> None:
    """GPU tensors are exchanged and differentiated without an MPI that knows CUDA."""
    assert run_mpi(gathers_on_a_gpu, 2) == [True, True]


def dies_on_rank_1(comm: Communicator) -> None:
    """Rank 1 ends without a word in the middle of the run, as a killed process does."""
    comm.barrier()
    if comm.rank == 1:
        os._exit(9)
    comm.all_reduce_sum(torch.zeros(2), label="loss")


def test_a_dead_rank_is_a_comm_error_at_the_deadline() -> None:
    """Where the launcher leaves the others alive, they name the dead rank and the exchange, and end by themselves."""
    if "HYDRA" not in subprocess.run([str(find_mpiexec()), "--version"], capture_output=True, text=True).stdout:
        pytest.skip("only MPICH's mpiexec can be told to leave the others alive")
    left, dead = run_mpi(dies_on_rank_1, 2, timeout_s=1.0, options=["-disable-auto-cleanup"])
    assert isinstance(dead, EOFError) and isinstance(left, CommError)
    assert "rank 0 of 2 (mpi): all_reduce_sum(float32[2]) for loss failed" in str(left)
    assert re.search(r"waited \d\.\d s for rank 1;", str(left))


def test_a_rank_that_never_joins_is_a_comm_error(tmp_path: Path) -> None:
    """A rank that ends before it joins does not leave the others in MPI_Init for ever."""
    code = (
        "import os\n"
        "if os.environ['PMI_RANK'] != '1':\n"
        "    from dist_attn.comm import open_communicator\n"
        "    from dist_attn.errors import CommError\n"
        "    try:\n"
        "        open_communicator(timeout_s=0.5)\n"
        "    except CommError as error:\n"
        "        raise SystemExit(f'said: {error}')\n"
    )
    exit_code, out, err = finish(start_under_mpiexec(["-c", code], 2, tmp_path))
    assert (exit_code, out) == (1, "")
    assert "said: rank 0 of 2 could not join the mpi group, MPI_Init: no answer within 0.5 s" in err


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small model and a text."""
    folder = tmp_path_factory.mktemp("mpi")
    write_small_folder(folder / "tiny")
    (folder / "book.txt").write_bytes(3 * PROSE.encode())
    return folder


ENCODE = ["-m", "dist_attn", "encode", "book.txt", "--model", "tiny", "--window", "300", "--out"]


def test_encoding_under_mpiexec_gives_the_rows_of_one(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three ranks write the rows of one process, and one report, on a machine with fewer cores as well."""
    started = start_under_mpiexec([*ENCODE, "three.npy"], 3, place)
    alone = run_here(monkeypatch, place, *ENCODE[2:], "one.npy")
    code, out, err = finish(started)
    assert alone == 0
    assert code == 0 and err.startswith("device cpu, float32, 3 ranks over mpi, ")
    assert len(out.splitlines()) == 1
    three = json.loads(out)
    one = json.loads(capsys.readouterr().out)
    assert list(three) == list(one)
    assert (three["ranks"], three["backend"], three["tokens"]) == (3, "mpi", one["tokens"])
    assert len(three["peak_rss_mib"]) == 3
    rows = [np.load(place / f"{name}.npy", allow_pickle=False) for name in ("one", "three")]
    np.testing.assert_allclose(rows[1], rows[0], rtol=1e-4, atol=1e-5)


def test_bad_input_under_mpiexec_is_said_once(place: Path) -> None:
    """A missing file is one line in all, with exit code 2."""
    arguments = ["-m", "dist_attn", "encode", "nope.txt", "--model", "tiny", "--out", "no.npy"]
    said = finish(start_under_mpiexec(arguments, 2, place))
    assert said == (2, "", "dist-attn: nope.txt cannot be read: No such file or directory\n")
    assert not list(place.glob("*no.npy*"))


def _ranks(launcher: psutil.Process) -> list[psutil.Process]:
    """The processes that encode, without what they have just forked to run another program."""
    parents: dict[psutil.Process, psutil.Process | None] = {}
    for process in launcher.children(recursive=True):
        # One that has ended since has no command line, waited for or not.
        with contextlib.suppress(psutil.NoSuchProcess):
            if "encode" in process.cmdline():
                parents[process] = process.parent()
    return [process for process, parent in parents.items() if parent not in parents]


def test_ranks_do_not_outlive_a_killed_launcher(place: Path) -> None:
    """When mpiexec is killed outright, its ranks end as well."""
    os.mkfifo(place / "endless")
    process = start_under_mpiexec(["-m", "dist_attn", "encode", "endless", *ENCODE[4:], "no.npy"], 2, place)
    try:
        with (place / "endless").open("wb", buffering=0) as text:
            text.write(b"It was the best of times")
            ranks = _ranks(psutil.Process(process.pid))
            assert len(ranks) == 2
            process.kill()
            gone, left = psutil.wait_procs(ranks, DEADLINE_S)
            assert (len(gone), left) == (2, [])
    finally:
        kill_family(process)
        process.communicate()
