"""Sequence operations across ranks: exchanges of carries and halos around the local operations."""

from dist_attn.sharded.carry_scan import sharded_linear_attention
from dist_attn.sharded.prefix_scan import Algorithm, Exchange, exclusive_scan
from dist_attn.sharded.sequence_ops import ShardedSequenceOps
from dist_attn.sharded.sharding import CacheKept, SoftmaxExchange

__all__ = [
    "Algorithm",
    "CacheKept",
    "Exchange",
    "ShardedSequenceOps",
    "SoftmaxExchange",
    "exclusive_scan",
    "sharded_linear_attention",
]
