"""Operations of the papers along the sequence; each takes `ops`, over which it runs, and has its form over ranks."""

from dist_attn_papers.ops.dense_space import dense_scan
from dist_attn_papers.ops.diagonal import diagonal_scan
from dist_attn_papers.ops.fourier import fourier_mix
from dist_attn_papers.ops.legs import LegsState, legs_memory, legs_step, reconstruct
from dist_attn_papers.ops.long_convolution import long_convolve
from dist_attn_papers.ops.relative_attention import (
    RelativeState,
    relative_attention,
    relative_attention_step,
    relative_attention_streaming,
)
from dist_attn_papers.ops.token_mixing import mix_tokens
from dist_attn_papers.ops.token_routing import RoutedTokens, route_tokens
from dist_attn_papers.ops.token_selection import Interpolation, SelectedTokens, select_tokens

__all__ = [
    "Interpolation",
    "LegsState",
    "RelativeState",
    "RoutedTokens",
    "SelectedTokens",
    "dense_scan",
    "diagonal_scan",
    "fourier_mix",
    "legs_memory",
    "legs_step",
    "long_convolve",
    "mix_tokens",
    "reconstruct",
    "relative_attention",
    "relative_attention_step",
    "relative_attention_streaming",
    "route_tokens",
    "select_tokens",
]
