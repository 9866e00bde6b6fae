"""Sequence operations across ranks: exchanges of carries and halos around the local operations."""

from dist_attn.sharded.carry_scan import carry_scan, sharded_linear_attention
from dist_attn.sharded.sequence_ops import ShardedSequenceOps

__all__ = ["ShardedSequenceOps", "carry_scan", "sharded_linear_attention"]
