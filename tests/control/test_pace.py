"""How fast the ranks are, as steps tell it."""

import pytest

from dist_attn.control.steps import Pace


def test_the_first_step_is_believed_and_later_ones_move_it():
    """One slow step does not turn the schedule over, and a machine that has become slow is noticed."""
    pace = Pace()
    pace.learn(1000, 4, 1.0, 0.4)
    assert (pace.token_s, pace.round_s) == (1e-3, 0.1)
    pace.learn(1000, 4, 2.0, 0.8)
    assert pace.token_s == pytest.approx(1.2e-3)
    assert pace.round_s == pytest.approx(0.12)
    for _ in range(40):
        pace.learn(1000, 4, 2.0, 0.8)
    assert pace.token_s == pytest.approx(2e-3, rel=1e-2)


def test_steps_that_say_nothing_change_nothing():
    """A few tokens cost what a block costs, and a step without decoding knows nothing of it."""
    pace = Pace(1e-3, 0.1)
    pace.learn(3, 0, 5.0, 0.0)
    pace.learn(0, 0, 0.0, 0.0)
    assert pace == Pace(1e-3, 0.1)
