"""Numbered examples: a seeded order for each epoch, which needs no stored state, and the names of their classes."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from dist_attn.errors import ConfigError


@lru_cache(maxsize=4)
def permutation(seed: int, epoch: int, count: int) -> NDArray[np.int64]:
    """Order the numbers 0 to count - 1 for this epoch; a function of its arguments alone.

    Cost: O(count) once an epoch.
    """
    order = np.random.default_rng((seed, epoch)).permutation(count)
    order.flags.writeable = False  # the cache hands the same array to everybody
    return order


def examples_of_step(step: int, batch: int, count: int, seed: int) -> NDArray[np.int64]:
    """The numbers of the `batch` examples, of `count`, that a step reads, [batch].

    Each comes once an epoch. Epochs follow each other without a gap, so a batch may hold the last ones of an epoch and
    the first ones of the next.
    """
    places = np.arange(step * batch, (step + 1) * batch)
    epochs, within = places // count, places % count
    return np.array([permutation(seed, int(e), count)[i] for e, i in zip(epochs, within, strict=True)], dtype=np.int64)


def check_enough(count: int, batch: int, what: str) -> None:
    """Raise ConfigError for fewer examples than a batch has."""
    if count < batch:
        raise ConfigError(f"there are {count} {what}; a batch needs {batch}. Give more, or a smaller data.batch")


Label = str | int


@dataclass(frozen=True)
class LabelNames:
    """The labels of the training examples in order, numbers by size and words by the alphabet: class c is names[c]."""

    names: tuple[Label, ...]

    @classmethod
    def of(cls, labels: Iterable[Label]) -> "LabelNames":
        """Make names of the labels that occur, each once."""
        return cls(tuple(sorted(set(labels), key=lambda label: (isinstance(label, str), label))))

    def number(self, label: Label, where: str) -> int:
        """The class of a label.

        Raises: ConfigError for one that no training example has.
        """
        if label not in self._numbers:
            raise ConfigError(f"{where}: label {label!r} is not one of the training examples', {self._shown()}")
        return self._numbers[label]

    def check(self, num_classes: int) -> None:
        """Raise ConfigError unless a model of so many classes has one for each label."""
        if len(self.names) != num_classes:
            raise ConfigError(
                f"the training examples have {len(self.names)} labels, {self._shown()}; model.num_classes is "
                f"{num_classes}: they must be equal"
            )

    @cached_property
    def _numbers(self) -> dict[Label, int]:
        return {name: number for number, name in enumerate(self.names)}

    def _shown(self) -> str:
        return ", ".join(map(repr, self.names[:8])) + (", …" if len(self.names) > 8 else "")
