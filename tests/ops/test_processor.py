"""Flushing of denormal numbers: on inside, as it was outside."""

import pytest
import torch

from dist_attn.ops.processor import denormals_flushed


def half_of_the_smallest() -> float:
    """A number that float32 holds as a denormal only."""
    return float(torch.tensor(torch.finfo(torch.float32).tiny) * 0.5)


def test_they_are_zero_inside_and_as_before_outside() -> None:
    """Inside a denormal result is 0, nested or not; afterwards, and after an error, it is what it was."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    torch.set_flush_denormal(False)
    assert half_of_the_smallest() > 0
    with denormals_flushed():
        with denormals_flushed():
            assert half_of_the_smallest() == 0
        assert half_of_the_smallest() == 0
    assert half_of_the_smallest() > 0
    with pytest.raises(KeyError), denormals_flushed():
        raise KeyError
    assert half_of_the_smallest() > 0
