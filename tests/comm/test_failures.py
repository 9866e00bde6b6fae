"""Ranks that differ, die or are late: every other rank learns at once who and where, or at the deadline."""

import os
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.futures import Future

from dist_attn.comm import Communicator, differentiable, run_simulated
from dist_attn.comm.call import ExchangeCall
from dist_attn.comm.torch_dist import first_failed
from dist_attn.errors import CommError, InputError, MismatchError
from tests.support.ranks import run_processes, run_ranks
from tests.support.waiting import eventually


def test_simulated_names_who_called_what() -> None:
    """Ranks that call different exchanges are a MismatchError with every rank and its call."""

    def fn(comm: Communicator) -> None:
        if comm.rank == 1:
            comm.barrier()
        else:
            comm.all_gather(torch.zeros(2, 3), label="carry")

    with pytest.raises(MismatchError) as caught:
        run_simulated(fn, 2)
    message = str(caught.value)
    assert "rank 0 called all_gather(float32[2, 3]) for carry" in message
    assert "rank 1 called barrier()" in message


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.zeros(2), torch.zeros(3)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
        (torch.zeros(2), torch.zeros(1, 2)),
    ],
)
def test_simulated_compares_shapes_and_dtypes(one: torch.Tensor, other: torch.Tensor) -> None:
    """The same exchange of different shapes or dtypes is a MismatchError."""
    with pytest.raises(MismatchError, match="differs between ranks"):
        run_simulated(lambda comm: comm.all_gather(other if comm.rank == 2 else one), 3)


def test_simulated_compares_labels_and_sources() -> None:
    """A label or a broadcast source that differs is a MismatchError."""
    with pytest.raises(MismatchError, match="for layer 1"):
        run_simulated(lambda comm: comm.barrier(label=f"layer {comm.rank}"), 2)
    with pytest.raises(MismatchError, match="broadcast from rank 1"):
        run_simulated(lambda comm: comm.broadcast(torch.zeros(1), comm.rank), 2)


def test_simulated_compares_row_counts() -> None:
    """Rows sent that the receiver does not expect are a MismatchError naming both."""

    def fn(comm: Communicator) -> None:
        receive = [1, 1] if comm.rank == 0 else [2, 1]
        comm.all_to_all(torch.zeros(2, 4), [1, 1], receive)

    with pytest.raises(MismatchError, match="rank 0 sends 16 bytes to rank 1, which expects 32"):
        run_simulated(fn, 2)


def test_simulated_compares_who_needs_a_gradient() -> None:
    """A rank that would stay out of the backward exchange is found in the forward one."""

    def fn(comm: Communicator) -> None:
        differentiable.all_gather(comm, torch.zeros(2, requires_grad=comm.rank == 0))

    with pytest.raises(MismatchError, match="with gradient"):
        run_simulated(fn, 2)


def test_simulated_raises_the_first_real_exception() -> None:
    """What one rank raised comes out, with its rank, and not the errors of the ranks that lost it."""

    def fn(comm: Communicator) -> None:
        if comm.rank == 2:
            raise KeyError("the real one")
        comm.barrier()

    with pytest.raises(KeyError, match="the real one") as caught:
        run_simulated(fn, 4)
    assert any("rank 2 of 4" in note for note in caught.value.__notes__)


def test_simulated_partners_learn_why() -> None:
    """The ranks that wait for a dead one get a CommError that names themselves, their exchange and the cause."""
    seen: dict[int, str] = {}

    def fn(comm: Communicator) -> None:
        if comm.rank == 1:
            raise ValueError("out of ideas")
        try:
            comm.all_reduce_sum(torch.zeros(2), label="loss")
        except CommError as error:
            seen[comm.rank] = str(error)
            raise

    with pytest.raises(ValueError, match="out of ideas"):
        run_simulated(fn, 3)
    assert sorted(seen) == [0, 2]
    for rank, message in seen.items():
        assert f"rank {rank} of 3 gave up in all_reduce_sum(float32[2]) for loss" in message
        assert "ValueError: out of ideas" in message


def test_simulated_finds_a_rank_that_returned_early() -> None:
    """A rank that makes fewer calls than the others is named at once, without waiting for the deadline."""
    with pytest.raises(MismatchError, match=r"rank 0 returned after 0 exchange\(s\)"):
        run_simulated(lambda comm: comm.barrier() if comm.rank else None, 3, timeout_s=3600.0)


def test_simulated_wait_has_a_deadline() -> None:
    """A rank that never comes is named when the deadline has passed."""
    given_up = threading.Event()

    def fn(comm: Communicator) -> None:
        if comm.rank == 0:
            pending = comm.all_gather_start(torch.zeros(1))
            try:
                pending.wait()
            finally:
                given_up.set()
        else:
            assert given_up.wait(60)
            comm.barrier()

    with pytest.raises(CommError, match=r"rank 0 waited 0.1 s in exchange 0, all_gather.* for rank 1"):
        run_simulated(fn, 2, timeout_s=0.1)


def test_simulated_stays_failed() -> None:
    """After a failure the group is of no use: later exchanges fail at once, so nobody works with half a group."""

    def fn(comm: Communicator) -> str:
        with pytest.raises(CommError):
            comm.all_gather(torch.zeros(comm.rank))
        with pytest.raises(CommError) as caught:
            comm.barrier()
        return str(caught.value)

    assert all("the group failed" in message for message in run_simulated(fn, 3))


@pytest.mark.parametrize("enabled", [True, False])
def test_simulated_inherits_the_gradient_mode(enabled: bool) -> None:
    """Ranks run with the caller's gradient mode."""
    with torch.set_grad_enabled(enabled):
        assert run_simulated(lambda _: torch.is_grad_enabled(), 2) == [enabled, enabled]


def test_simulated_needs_a_rank() -> None:
    """A group of no ranks is refused."""
    with pytest.raises(InputError, match="at least 1 rank"):
        run_simulated(lambda comm: comm.rank, 0)


def raises_on_rank_1(comm: Communicator) -> None:
    """Rank 1 raises, the others wait for it."""
    if comm.rank == 1:
        raise KeyError("the real one")
    comm.barrier()


def dies_on_rank_1(comm: Communicator) -> None:
    """Rank 1 ends without a word in the middle of the run, as a killed process does."""
    comm.barrier()
    if comm.rank == 1:
        os._exit(9)
    comm.all_reduce_sum(torch.zeros(2), label="loss")


def hangs_on_rank_1(given_up: Path, then_s: float | None, comm: Communicator) -> str:
    """Rank 1 comes to no more exchanges until the others have given up; their second one is not even tried."""
    comm.barrier()
    if then_s is not None:
        comm.set_deadline(then_s)
    if comm.rank == 1:
        eventually(given_up.exists, "rank 0 to give up")
        return "late"
    with pytest.raises(CommError) as caught:
        comm.all_gather(torch.zeros(2))
    with pytest.raises(CommError, match="cannot do barrier"):
        comm.barrier()
    with pytest.raises(CommError, match=r"all_gather\(float32\[2\]\) failed after"):
        comm.check_exchanges()
    given_up.touch()
    return str(caught.value)


def test_simulated_ranks_wait_as_long_as_they_were_told_last() -> None:
    """A deadline that is set later holds for what begins from then on."""

    def fn(comm: Communicator) -> None:
        comm.set_deadline(60.0)
        if comm.rank:
            time.sleep(0.5)
        comm.barrier()

    run_simulated(fn, 2, timeout_s=0.1)


def test_gloo_raises_the_first_real_exception() -> None:
    """With processes, too, what one rank raised by itself comes out."""
    with pytest.raises(KeyError, match="the real one"):
        run_ranks("gloo", raises_on_rank_1, 2)


def test_gloo_dead_rank_is_a_comm_error() -> None:
    """When a process dies, the others get a CommError with rank and operation long before the deadline."""
    outcomes = run_processes(dies_on_rank_1, 3, timeout_s=3600.0)
    assert isinstance(outcomes[1], EOFError)
    for rank in (0, 2):
        assert isinstance(outcomes[rank], CommError)
        assert f"rank {rank} of 3 (gloo): all_reduce_sum(float32[2]) for loss failed" in str(outcomes[rank])


@pytest.mark.parametrize(("timeout_s", "then_s"), [(2.5, None), (3600.0, 2.5)])
def test_gloo_wait_has_a_deadline(timeout_s: float, then_s: float | None, tmp_path: Path) -> None:
    """A rank that hangs is a CommError on the others when the deadline has passed, also one that was set later."""
    outcomes = run_processes(partial(hangs_on_rank_1, tmp_path / "given up", then_s), 2, timeout_s=timeout_s)
    assert outcomes[1] == "late"
    assert "rank 0 of 2 (gloo): all_gather(float32[2]) failed after" in str(outcomes[0])
    assert "2.5 s" in str(outcomes[0])


def test_the_first_queued_exchange_that_failed_is_named() -> None:
    """Of exchanges that a GPU is still to do, the first one that torch gives a bad result is the one that failed."""
    queued: list[tuple[ExchangeCall, Future[int]]] = [
        (ExchangeCall("all_gather", label=f"layer {n}"), Future()) for n in range(4)
    ]
    assert first_failed(queued) == "one of 4 exchanges, the last of them all_gather() for layer 3,"
    for (_, result), said in zip(queued, (0, 1, 2), strict=False):
        result.set_result(said)
    assert first_failed(queued) == "all_gather() for layer 1"
    assert first_failed([]) == "an exchange"
