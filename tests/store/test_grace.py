"""When expired entries may be deleted: after a time of the monotonic clock in which the wall clock ran evenly."""

import math

from dist_attn.store import ExpiryGrace
from tests.support.stores import Clock

WEEK = 7 * 86_400.0


def test_nothing_is_deleted_before_the_grace_has_passed() -> None:
    """From the start, and again after every jump of the wall clock in either direction, nothing may go for a while."""
    clock = Clock()
    grace = ExpiryGrace(100.0, clock, clock.monotonic)
    assert grace.deletable_until() == -math.inf
    clock.now += 60
    assert grace.deletable_until() == -math.inf
    clock.now += 60
    assert grace.deletable_until() == clock() - 100.0
    for step in (WEEK, -WEEK):
        clock.step += step
        assert grace.deletable_until() == -math.inf
        assert grace.take_jump() == step and grace.take_jump() == 0.0
        clock.now += 99
        assert grace.deletable_until() == -math.inf
        clock.now += 1
        assert grace.deletable_until() == clock() - 100.0


def test_a_short_life_has_a_short_grace() -> None:
    """What lives for ten seconds has expired by any clock ten seconds after a jump."""
    clock = Clock()
    grace = ExpiryGrace(100.0, clock, clock.monotonic)
    clock.step = WEEK
    assert grace.deletable_until(10.0) == -math.inf
    clock.now += 10
    assert grace.deletable_until(10.0) == clock() - 10.0
    assert grace.deletable_until(1000.0) == grace.deletable_until() == -math.inf


def test_a_clock_that_is_corrected_slowly_has_not_jumped() -> None:
    """Corrections of a second between two looks do not start the grace anew."""
    clock = Clock()
    grace = ExpiryGrace(100.0, clock, clock.monotonic)
    for _ in range(4):
        clock.now, clock.step = clock.now + 30, clock.step + 1
        until = grace.deletable_until()
    assert until == clock() - 100.0 and grace.take_jump() == 0.0


def test_a_jump_skips_a_round_even_without_a_grace() -> None:
    """With a grace of nothing the round that sees the jump deletes nothing."""
    clock = Clock()
    grace = ExpiryGrace(0.0, clock, clock.monotonic)
    assert grace.deletable_until() == clock()
    clock.step = WEEK
    assert grace.deletable_until() == -math.inf
    assert grace.deletable_until() == clock()
