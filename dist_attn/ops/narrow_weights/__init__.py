"""Products with weights of fewer bits: how they are rounded, the oracle, and what is fast on which machine."""

from dist_attn.ops.narrow_weights.naive import bfloat16_linear_naive, int8_linear_naive
from dist_attn.ops.narrow_weights.products import (
    Bfloat16Product,
    Int8Product,
    bfloat16_linear,
    bfloat16_product,
    int8_linear,
    int8_product,
    int8_step_linear,
)
from dist_attn.ops.narrow_weights.rounding import round_rows, widen_rows

__all__ = [
    "Bfloat16Product",
    "Int8Product",
    "bfloat16_linear",
    "bfloat16_linear_naive",
    "bfloat16_product",
    "int8_linear",
    "int8_linear_naive",
    "int8_product",
    "int8_step_linear",
    "round_rows",
    "widen_rows",
]
