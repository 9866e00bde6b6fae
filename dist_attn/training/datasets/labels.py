"""Names of classes: what examples are labelled with, and the number that stands for it."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from dist_attn.errors import ConfigError

__all__ = ["Label", "LabelNames"]

Label = str | int


@dataclass(frozen=True)
class LabelNames:
    """The labels of the training examples in order, numbers by size and words by the alphabet: class c is names[c]."""

    names: tuple[Label, ...]

    @classmethod
    def of(cls, labels: Iterable[Label]) -> "LabelNames":
        """Every label that occurs, once."""
        return cls(tuple(sorted(set(labels), key=lambda label: (isinstance(label, str), label))))

    def number(self, label: Label, where: str) -> int:
        """The class of a label.

        Raises: ConfigError for one that no training example has.
        """
        if label not in self._numbers:
            raise ConfigError(f"{where}: label {label!r} is not one of the training examples', {self._shown()}")
        return self._numbers[label]

    def check(self, num_classes: int) -> None:
        """Raises ConfigError unless a model of so many classes has one for each label."""
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
