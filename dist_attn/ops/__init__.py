"""Operations along the sequence: naive oracles, fast forms, and the seam that models use."""

from dist_attn.ops.convolution import convolve, convolve_streaming
from dist_attn.ops.denominator import Denominator
from dist_attn.ops.feature_map import FeatureMap
from dist_attn.ops.fourier import fourier_mix
from dist_attn.ops.linear_attention import absorb_keys, linear_attention, linear_attention_step
from dist_attn.ops.relative_attention import relative_attention, relative_attention_step
from dist_attn.ops.sequence_ops import LocalSequenceOps, SequenceOps
from dist_attn.ops.softmax_attention import softmax_attention
from dist_attn.ops.state import LinearState
from dist_attn.ops.watch import Watch, current_watch, watching

__all__ = [
    "Denominator",
    "FeatureMap",
    "LinearState",
    "LocalSequenceOps",
    "SequenceOps",
    "Watch",
    "absorb_keys",
    "convolve",
    "convolve_streaming",
    "current_watch",
    "fourier_mix",
    "linear_attention",
    "linear_attention_step",
    "relative_attention",
    "relative_attention_step",
    "softmax_attention",
    "watching",
]
