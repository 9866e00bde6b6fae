"""Token mixers: one template, one file per family."""

from dist_attn.mixers.base import MixerState, TokenMixer
from dist_attn.mixers.build import build_mixer
from dist_attn.mixers.config import DenominatorConfig, MixerConfig, RandomFeatureConfig, SoftmaxConfig

__all__ = [
    "DenominatorConfig",
    "MixerConfig",
    "MixerState",
    "RandomFeatureConfig",
    "SoftmaxConfig",
    "TokenMixer",
    "build_mixer",
]
