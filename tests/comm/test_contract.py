"""One contract for every back end: local, simulated ranks and real processes over gloo."""

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
    ("gloo", 2),
    ("gloo", 3),
]


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
def gloo_failures(size: int) -> dict[str, str]:
    """The failed cases of one group of processes, which is started once for all cases."""
    return {name: text for failed in run_ranks("gloo", run_all_cases, size) for name, text in failed.items()}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("kind", "size"), GROUPS, ids=lambda value: str(value))
def test_contract(kind: Kind, size: int, case: str) -> None:
    """Every back end keeps every promise in contract_cases.py."""
    if kind == "gloo":
        assert case not in gloo_failures(size), gloo_failures(size)[case]
    else:
        run_ranks(kind, CASES[case], size)


@pytest.mark.parametrize(("kind", "size"), GROUPS[:5], ids=lambda value: str(value))
def test_close(kind: Kind, size: int) -> None:
    """A closed communicator refuses exchanges (gloo: at the end of its contract run)."""
    if kind != "local":
        run_ranks(kind, closes_for_good, size)
