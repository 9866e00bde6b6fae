"""In which precision a model's weights lie in memory while it reads and writes."""

from typing import Literal

__all__ = ["WeightPrecision"]

WeightPrecision = Literal["float32", "bfloat16", "int8"]
