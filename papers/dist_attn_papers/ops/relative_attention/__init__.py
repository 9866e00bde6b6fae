"""Relative attention (Scaleformer): the oracle, the windowed form in O(L), the decode step, the forms over ranks."""

from dist_attn_papers.ops.relative_attention.call import (
    RelativeCall,
    RelativeStreamCall,
    check_relative_choice,
    choose_relative,
)
from dist_attn_papers.ops.relative_attention.state import RelativeState, WindowState
from dist_attn_papers.ops.relative_attention.windowed import (
    attend_relative,
    relative_attention,
    relative_attention_naive,
    relative_attention_step,
    relative_attention_streaming,
    stream_relative,
)

# The forms over ranks are registered as this is imported.
from dist_attn_papers.ops.relative_attention import sharded  # noqa: F401  # isort: skip

__all__ = [
    "RelativeCall",
    "RelativeState",
    "RelativeStreamCall",
    "WindowState",
    "attend_relative",
    "check_relative_choice",
    "choose_relative",
    "relative_attention",
    "relative_attention_naive",
    "relative_attention_step",
    "relative_attention_streaming",
    "stream_relative",
]
