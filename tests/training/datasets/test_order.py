"""The order of examples: every one once an epoch, another order each time, and nothing to remember."""

import numpy as np

from dist_attn.training.datasets.examples import examples_of_step


def test_every_example_comes_once_an_epoch():
    """Batches that do not divide the number of examples go on into the next epoch, none read twice before all."""
    read = np.concatenate([examples_of_step(step, 4, 10, seed=1) for step in range(10)])
    epochs = read.reshape(4, 10)
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs.tolist())
    assert len({tuple(epoch) for epoch in epochs.tolist()}) == 4


def test_a_step_depends_on_nothing_but_its_arguments():
    """Steps asked for in any order, after other seeds, are the same."""
    want = [examples_of_step(step, 3, 7, seed=5).tolist() for step in range(9)]
    examples_of_step(2, 3, 7, seed=6)
    assert [examples_of_step(step, 3, 7, seed=5).tolist() for step in (8, 0, 4)] == [want[8], want[0], want[4]]
    assert [examples_of_step(step, 3, 7, seed=6).tolist() for step in range(9)] != want


def test_a_batch_larger_than_an_epoch_repeats_evenly():
    """Ten of three examples are each of them three times, and one a fourth time."""
    counts = np.bincount(examples_of_step(0, 10, 3, seed=0))
    assert sorted(counts.tolist()) == [3, 3, 4]
