"""The diagonal state-space recurrence: the oracle, and the chunked form with a backward pass of bounded memory."""

from dist_attn.ops.diagonal.chunked import absorb_inputs, diagonal_scan, state_types
from dist_attn.ops.diagonal.naive import diagonal_scan_naive
from dist_attn.ops.diagonal.packed import packed_diagonal_scan
from dist_attn.ops.diagonal.powers import power, powers

__all__ = [
    "absorb_inputs",
    "diagonal_scan",
    "diagonal_scan_naive",
    "packed_diagonal_scan",
    "power",
    "powers",
    "state_types",
]
