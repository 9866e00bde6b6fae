"""Token mixers: one template, one file per family."""

from dist_attn.mixers.base import MixerState, TokenMixer
from dist_attn.mixers.build import build_mixer
from dist_attn.mixers.config import (
    BidirectionalConfig,
    CrossConfig,
    DenominatorConfig,
    MixerConfig,
    RandomFeatureConfig,
    RotaryConfig,
    ScaleformerConfig,
    SoftmaxConfig,
)
from dist_attn.mixers.cross import CrossAttention, MemoryState
from dist_attn.mixers.random_feature import RandomFeatureAttention

__all__ = [
    "BidirectionalConfig",
    "CrossAttention",
    "CrossConfig",
    "DenominatorConfig",
    "MemoryState",
    "MixerConfig",
    "MixerState",
    "RandomFeatureAttention",
    "RandomFeatureConfig",
    "RotaryConfig",
    "ScaleformerConfig",
    "SoftmaxConfig",
    "TokenMixer",
    "build_mixer",
]
