"""One contract for every back end: local, simulated ranks and real processes over gloo and MPI."""

import traceback
from functools import cache

import pytest

from dist_attn.comm import Communicator
from tests.comm.contract_cases import CASES, closes_for_good
from tests.support.ranks import Kind, run_ranks

GROUPS: list[tuple[Kind, int]] = [
    ("local", 1),
    ("simulated", 1),
    ("simulated", 2),
    ("simulated", 3),
    ("simulated", 5),
]
PROCESSES = [("gloo", 2), ("gloo", 3), pytest.param("mpi", 3, marks=pytest.mark.mpi)]


def run_all_cases(comm: Communicator) -> dict[str, str]:
    """Run every case on one rank; the traceback of each that failed."""
    failed = {}
    for name, case in CASES.items():
        try:
            case(comm)
        except Exception:
            failed[name] = f"rank {comm.rank}: {traceback.format_exc()}"
    closes_for_good(comm)
    return failed


@cache
def process_failures(kind: Kind, size: int) -> dict[str, str]:
    """The failed cases of one group of processes, which is started once for all cases."""
    return {name: text for failed in run_ranks(kind, run_all_cases, size) for name, text in failed.items()}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("kind", "size"), GROUPS, ids=lambda value: str(value))
def test_contract(kind: Kind, size: int, case: str) -> None:
    """Every back end keeps every promise in contract_cases.py."""
    run_ranks(kind, CASES[case], size)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("kind", "size"), PROCESSES, ids=lambda value: str(value))
def test_contract_between_processes(kind: Kind, size: int, case: str) -> None:
    """So do the ones between processes; their ranks, started once, run all cases and then close."""
    failures = process_failures(kind, size)
    assert case not in failures, failures[case]


@pytest.mark.parametrize(("kind", "size"), GROUPS[1:], ids=lambda value: str(value))
def test_close(kind: Kind, size: int) -> None:
    """A closed communicator refuses exchanges (between processes: at the end of their contract run)."""
    run_ranks(kind, closes_for_good, size)
