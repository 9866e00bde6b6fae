"""State spaces with a full transition matrix: the oracle, and chunks with a backward pass of bounded memory."""

from dist_attn.ops.dense_space.chunked import absorb_dense_inputs, dense_scan
from dist_attn.ops.dense_space.krylov import columns_of_powers, matrix_power, rows_of_powers
from dist_attn.ops.dense_space.naive import dense_scan_naive

__all__ = [
    "absorb_dense_inputs",
    "columns_of_powers",
    "dense_scan",
    "dense_scan_naive",
    "matrix_power",
    "rows_of_powers",
]
