"""The exclusive scan of states over ranks, by several exchanges that give the same result to rounding."""

from dist_attn.ops.monoid import LogDecay, Matrix, Monoid
from dist_attn.sharded.prefix_scan.scan import (
    Algorithm,
    ScanExchange,
    exclusive_scan,
    exclusive_scan_start,
    scan_over_ranks,
    scan_over_ranks_start,
    settle,
)

__all__ = [
    "Algorithm",
    "ScanExchange",
    "LogDecay",
    "Matrix",
    "Monoid",
    "exclusive_scan",
    "exclusive_scan_start",
    "scan_over_ranks",
    "scan_over_ranks_start",
    "settle",
]
