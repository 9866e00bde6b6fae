"""The maximum so far of a sequence whose past fades by gates: what weights given by logarithms are relative to."""

from dist_attn.ops.running_maximum.log_steps import (
    NO_TOKENS,
    Element,
    Maxima,
    join,
    maxima,
    rise_from,
    running_maximum,
    scan_elements,
)
from dist_attn.ops.running_maximum.naive import running_maximum_naive

__all__ = [
    "NO_TOKENS",
    "Element",
    "Maxima",
    "join",
    "maxima",
    "rise_from",
    "running_maximum",
    "running_maximum_naive",
    "scan_elements",
]
