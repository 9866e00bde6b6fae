"""The study of two ranks: what a pass sends and gives, and how times become a ratio."""

from functools import partial

import pytest

from benchmarks.cases import COSTS
from benchmarks.rank_passes import Pass, Passed, pass_on_rank
from benchmarks.two_ranks import speedup
from tests.support.ranks import run_ranks


@pytest.mark.parametrize(("gradients", "carries"), [(False, 1), (True, 2)])
@pytest.mark.parametrize("gated", [False, True])
def test_a_pass_sends_one_carry_each_way(gated: bool, gradients: bool, carries: int) -> None:
    """Forward a rank of a pair sends one carry, and backward another, for any length; the first also works alone."""
    for length in (64, 200):
        one = Pass(length, gated, gradients)
        first, second = run_ranks("simulated", partial(pass_on_rank, one=one, rounds=2), 2)
        assert first.bytes_sent == second.bytes_sent == carries * COSTS.traffic().carry_bytes
        assert (len(first.alone_s), len(second.alone_s), len(second.together_s)) == (2, 0, 2)
        assert 0 <= second.exposed_share <= 1


def test_the_slower_rank_counts_in_every_round() -> None:
    """One rank's median over the median of the slower rank's rounds."""
    first = Passed((4.0, 8.0, 6.0), (3.0, 1.0, 2.0), (1.0,) * 3, (0.3, 0.2, 0.2), 1)
    second = Passed((), (1.0, 5.0, 1.0), (1.0,) * 3, (0.0,) * 3, 1)
    assert speedup([first, second]) == 6.0 / 3.0
    assert first.exposed_share == 0.1
