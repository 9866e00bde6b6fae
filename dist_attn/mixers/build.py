"""From a mixer's configuration to the mixer."""

from dist_attn.mixers.base import TokenMixer
from dist_attn.mixers.config import MixerConfig, SoftmaxConfig
from dist_attn.mixers.random_feature import RandomFeatureAttention
from dist_attn.mixers.softmax import SoftmaxAttention

__all__ = ["build_mixer"]


def build_mixer(config: MixerConfig) -> TokenMixer:
    """The mixer that `config.kind` names, with fresh parameters."""
    if isinstance(config, SoftmaxConfig):
        return SoftmaxAttention(config)
    return RandomFeatureAttention(config)
