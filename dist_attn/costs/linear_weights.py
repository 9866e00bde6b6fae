"""What the weights of linear layers take of memory in each precision; whatever else a model has stays in float32."""

from dataclasses import dataclass

from dist_attn.wire.choices import WeightPrecision

__all__ = ["LinearWeights"]

_SAVED_BYTES = {"float32": 0, "bfloat16": 2, "int8": 3}  # of each number, beside float32
_SCALE_BYTES = 2


@dataclass(frozen=True)
class LinearWeights:
    """Matrices that are rounded where fewer bits are asked for: all their numbers, and their rows, one an output.

    Biases and gates are not among them.
    """

    numbers: int = 0
    rows: int = 0

    def __add__(self, other: "LinearWeights") -> "LinearWeights":
        return LinearWeights(self.numbers + other.numbers, self.rows + other.rows)

    def __mul__(self, count: int) -> "LinearWeights":
        return LinearWeights(count * self.numbers, count * self.rows)

    def saved_bytes(self, precision: WeightPrecision) -> int:
        """How much less than in float32 they take; int8 has a scale for each row."""
        return _SAVED_BYTES[precision] * self.numbers - (_SCALE_BYTES * self.rows if precision == "int8" else 0)
