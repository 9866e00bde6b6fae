"""The monoids of the papers' recurrences: over every exchange they are the fold, and they are associative."""

import pytest
import torch

from dist_attn.sharded import ScanExchange
from dist_attn.sharded.prefix_scan import Monoid
from dist_attn_papers.ops.legs import LegsForgets
from dist_attn_papers.ops.powers import Powers
from tests.sharded import test_prefix_scan as core

core.COUNTING, core.CONSTANT = (Powers,), (Powers, LegsForgets)


def _drawn(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return (0.5 * torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=dtype)).requires_grad_()


MONOIDS = {
    "powers of known numbers": Powers(_drawn(2, 3, dtype=torch.complex128), 60),
    "powers of known matrices": Powers(_drawn(2, 3, 3), 60),
    "a memory of the whole past": LegsForgets(3),
}


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("exchange", [*core.EXCHANGES, ScanExchange("two_level")], ids=core.name_of)
@pytest.mark.parametrize("monoid", MONOIDS.values(), ids=MONOIDS.keys())
def test_every_monoid_over_every_exchange_is_the_fold(monoid: Monoid, exchange: ScanExchange, size: int) -> None:
    """Whatever a stretch does to a state, results, gradients and second gradients are those of a left fold."""
    core.test_every_monoid_over_every_exchange_is_the_fold(monoid, exchange, size)


@pytest.mark.parametrize("monoid", MONOIDS.values(), ids=MONOIDS.keys())
def test_monoids_are_associative(monoid: Monoid) -> None:
    """It does not matter which of three messages are combined first, and zeros on either side change no bit."""
    core.test_monoids_are_associative(monoid)
