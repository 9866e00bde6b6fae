"""Token mixers: one template, one file per family."""

from dist_attn.mixers.base import (
    GrowingState,
    MixerState,
    Paradigm,
    TokenMixer,
    WholeSequenceMixer,
    build_mixer,
    require_own,
    state_zeros,
)
from dist_attn.mixers.feature_map_attention import RandomFeatureAttention
from dist_attn.mixers.random_matrices import redraw_pools
from dist_attn.model_config.figures import ScanMessage, TokenFlops, Traffic, Weights, linear
from dist_attn.model_config.mixer import MixerConfig, register_mixer
from dist_attn.model_config.mixers.attention import BidirectionalConfig, SoftmaxConfig
from dist_attn.model_config.mixers.convolutions import ConvolutionConfig
from dist_attn.model_config.mixers.delta_rules import GatedDeltaConfig, KimiDeltaConfig, Rwkv7Config
from dist_attn.model_config.mixers.heads import DenominatorConfig, RelativeConfig, RotaryConfig
from dist_attn.model_config.mixers.kernels import (
    EluConfig,
    RandomFeatureConfig,
)
from dist_attn.model_config.mixers.recurrent import GlaConfig, LightningConfig, Mamba2Config
from dist_attn.model_config.mixers.scans import MambaConfig, MLstmConfig, RgLruConfig

__all__ = [
    "BidirectionalConfig",
    "ConvolutionConfig",
    "DenominatorConfig",
    "EluConfig",
    "GatedDeltaConfig",
    "GlaConfig",
    "GrowingState",
    "KimiDeltaConfig",
    "LightningConfig",
    "Mamba2Config",
    "MLstmConfig",
    "MambaConfig",
    "MixerConfig",
    "MixerState",
    "Paradigm",
    "RandomFeatureAttention",
    "RandomFeatureConfig",
    "RelativeConfig",
    "RgLruConfig",
    "RotaryConfig",
    "Rwkv7Config",
    "ScanMessage",
    "SoftmaxConfig",
    "TokenFlops",
    "TokenMixer",
    "Traffic",
    "Weights",
    "WholeSequenceMixer",
    "build_mixer",
    "linear",
    "redraw_pools",
    "register_mixer",
    "require_own",
    "state_zeros",
]
