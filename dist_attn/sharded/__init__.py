"""Sequence operations across ranks: exchanges of carries and halos around the local operations.

`sequence_ops` has the interface, `sharding` what all operations of one communicator and layout share. A carry is
exchanged by `prefix_scan`: `scan` begins it, `exchanges` has a function for each exchange; `ops/monoid.py` says what is
combined.
Linear attention is `linear`, which prepares a call and attends within packed documents, and `carry_scan`, which attends
before and behind the scan. By turns (`in_turn`) and in deterministic mode `linear` passes the state from rank to rank;
packed documents that begin on an earlier rank gather it (`document_exchange`).
"""

# The forms over ranks are registered as these are imported.
from dist_attn.sharded import (  # noqa: F401
    affine,
    convolution,
    gated_scans,
    linear,
    softmax,
    sums,
)
from dist_attn.sharded.carry_scan import sharded_linear_attention
from dist_attn.sharded.prefix_scan import Algorithm, ScanExchange, exclusive_scan
from dist_attn.sharded.sequence_ops import ShardedSequenceOps
from dist_attn.sharded.sharding import CacheKept, Sharding, SoftmaxExchange, over_ranks

__all__ = [
    "Algorithm",
    "CacheKept",
    "ScanExchange",
    "ShardedSequenceOps",
    "Sharding",
    "SoftmaxExchange",
    "exclusive_scan",
    "over_ranks",
    "sharded_linear_attention",
]
