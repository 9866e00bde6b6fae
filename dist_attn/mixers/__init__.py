"""Token mixers: one template, one file per family."""

from dist_attn.mixers.base import MixerState, TokenMixer
from dist_attn.mixers.build import build_mixer
from dist_attn.mixers.config import (
    BidirectionalConfig,
    CrossConfig,
    EfficientConfig,
    EluConfig,
    MixerConfig,
    PerformerConfig,
    RandomFeatureConfig,
    ScaleformerConfig,
    SoftmaxConfig,
    StaticKernelConfig,
)
from dist_attn.mixers.cross import CrossAttention, MemoryState
from dist_attn.mixers.head_config import DenominatorConfig, RelativeConfig, RotaryConfig
from dist_attn.mixers.input_independent_config import (
    ConvolutionConfig,
    FourierConfig,
    HippoConfig,
    LsslConfig,
    S4Config,
    S4DConfig,
    SgConvConfig,
    TokenMlpConfig,
)
from dist_attn.mixers.paradigm import Paradigm
from dist_attn.mixers.random_feature import RandomFeatureAttention
from dist_attn.mixers.redraw import redraw_pools

__all__ = [
    "BidirectionalConfig",
    "ConvolutionConfig",
    "CrossAttention",
    "CrossConfig",
    "DenominatorConfig",
    "EfficientConfig",
    "EluConfig",
    "FourierConfig",
    "HippoConfig",
    "LsslConfig",
    "MemoryState",
    "MixerConfig",
    "MixerState",
    "PerformerConfig",
    "Paradigm",
    "RandomFeatureAttention",
    "RandomFeatureConfig",
    "RelativeConfig",
    "RotaryConfig",
    "S4Config",
    "S4DConfig",
    "ScaleformerConfig",
    "SgConvConfig",
    "SoftmaxConfig",
    "StaticKernelConfig",
    "TokenMixer",
    "TokenMlpConfig",
    "build_mixer",
    "redraw_pools",
]
