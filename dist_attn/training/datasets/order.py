"""In which order examples come: a seeded permutation for each epoch, which needs no stored state."""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from dist_attn.errors import ConfigError

__all__ = ["check_enough", "examples_of_step", "permutation"]


@lru_cache(maxsize=4)
def permutation(seed: int, epoch: int, count: int) -> NDArray[np.int64]:
    """The numbers 0 to count - 1 in the order of this epoch; a function of its arguments alone.

    Cost: O(count) once an epoch.
    """
    order = np.random.default_rng((seed, epoch)).permutation(count)
    order.flags.writeable = False  # the cache hands the same array to everybody
    return order


def examples_of_step(step: int, batch: int, count: int, seed: int) -> NDArray[np.int64]:
    """Which `batch` of `count` examples a step reads, [batch].

    Each comes once an epoch. Epochs follow each other without a gap, so a batch may hold the last ones of an epoch and
    the first ones of the next.
    """
    places = np.arange(step * batch, (step + 1) * batch)
    epochs, within = places // count, places % count
    return np.array([permutation(seed, int(e), count)[i] for e, i in zip(epochs, within, strict=True)], dtype=np.int64)


def check_enough(count: int, batch: int, what: str) -> None:
    """Raises ConfigError for fewer examples than a batch has."""
    if count < batch:
        raise ConfigError(f"there are {count} {what}; a batch needs {batch}. Give more, or a smaller data.batch")
