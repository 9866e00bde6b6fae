"""Token mixers: one template, one file per family."""

from dist_attn.mixers.base import MixerState, TokenMixer
from dist_attn.mixers.build import build_mixer
from dist_attn.mixers.config import DenominatorConfig, MixerConfig, RandomFeatureConfig, RotaryConfig, SoftmaxConfig

__all__ = [
    "DenominatorConfig",
    "MixerConfig",
    "MixerState",
    "RandomFeatureConfig",
    "RotaryConfig",
    "SoftmaxConfig",
    "TokenMixer",
    "build_mixer",
]
