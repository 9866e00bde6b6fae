"""Softmax attention: the oracle, PyTorch's fused kernels, and tiles whose partial results merge."""

from dist_attn.ops.softmax_attention.attention import (
    attend_documents,
    attend_exactly,
    softmax_attention,
    softmax_attention_naive,
)
from dist_attn.ops.softmax_attention.cache import (
    CacheRows,
    KeyValueCache,
    SoftmaxStreamCall,
    attend_onward,
    softmax_attention_of_rows,
    softmax_attention_streaming,
)
from dist_attn.ops.softmax_attention.call import QueryPlacement, RelativePositions, SoftmaxCall, SoftmaxOptions
from dist_attn.ops.softmax_attention.slots import CacheSlots, places_for, softmax_attention_of_slots
from dist_attn.ops.softmax_attention.tiled import attend_partially, merge_partials

__all__ = [
    "CacheRows",
    "CacheSlots",
    "KeyValueCache",
    "QueryPlacement",
    "RelativePositions",
    "SoftmaxCall",
    "SoftmaxOptions",
    "SoftmaxStreamCall",
    "attend_documents",
    "attend_exactly",
    "attend_onward",
    "attend_partially",
    "merge_partials",
    "places_for",
    "softmax_attention",
    "softmax_attention_naive",
    "softmax_attention_of_rows",
    "softmax_attention_of_slots",
    "softmax_attention_streaming",
]
