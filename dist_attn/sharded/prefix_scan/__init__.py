"""The exclusive scan of states over ranks, by several exchanges that give the same result to rounding."""

from dist_attn.sharded.prefix_scan.scan import (
    Algorithm,
    Exchange,
    RunningScan,
    exclusive_scan,
    exclusive_scan_start,
    settle,
)

__all__ = ["Algorithm", "Exchange", "RunningScan", "exclusive_scan", "exclusive_scan_start", "settle"]
