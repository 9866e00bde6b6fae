"""One contract for every back end: local, simulated ranks and real processes over gloo and MPI."""

import traceback

import pytest

from dist_attn.comm import Communicator
from tests.comm.brought import brought
from tests.comm.contract_cases import CASES, closes_for_good
from tests.support.closeness import assert_close
from tests.support.ranks import Kind, run_ranks

GROUPS = [
    ("local", 1),
    ("simulated", 1),
    ("simulated", 2),
    ("simulated", 3),
    ("simulated", 5),
    ("gloo", 2),
    ("gloo", 3),
    pytest.param("mpi", 3, marks=pytest.mark.mpi),
]


def arrives_before_it_has_left(comm: Communicator) -> None:
    """Rank 0 has what it receives, nothing, before the last rank asks for what it sends: then it tells that one to."""
    last, rows = comm.size - 1, brought(0, 1, 100_000)
    first = comm.rank == 0 < last
    send, recv = {last: 1} if first else {}, {0: 1} if comm.rank == last > 0 else {}
    with comm.split(0) as aside:
        if not first:
            aside.send_receive(rows[:0], send, recv)
        exchange = comm.send_receive_start(rows[: len(send)], send, recv)
        assert_close(exchange.arrived(), rows[: len(recv)], kind="exact")
        if first:
            aside.send_receive(rows, send, recv)
        assert_close(exchange.wait(), rows[: len(recv)], kind="exact")


def run_all_cases(comm: Communicator) -> dict[str, str]:
    """Run every case on one rank, then close it; the traceback of each that failed."""
    failed = {}
    for name, case in {**CASES, arrives_before_it_has_left.__name__: arrives_before_it_has_left}.items():
        try:
            case(comm)
        except Exception:
            failed[name] = f"rank {comm.rank}: {traceback.format_exc()}"
    if comm.backend != "local":  # which has nobody to refuse
        closes_for_good(comm)
    return failed


@pytest.mark.parametrize(("kind", "size"), GROUPS, ids=str)
def test_contract(kind: Kind, size: int) -> None:
    """Every back end keeps every promise in contract_cases.py, and those between ranks refuse exchanges once closed."""
    assert run_ranks(kind, run_all_cases, size) == [{}] * size
