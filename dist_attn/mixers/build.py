"""From a mixer's configuration to the mixer."""

from dist_attn.mixers.base import TokenMixer
from dist_attn.mixers.bidirectional import BidirectionalAttention
from dist_attn.mixers.config import BidirectionalConfig, MixerConfig, ScaleformerConfig, SoftmaxConfig
from dist_attn.mixers.random_feature import RandomFeatureAttention
from dist_attn.mixers.scaleformer import ScaleformerAttention
from dist_attn.mixers.softmax import SoftmaxAttention

__all__ = ["build_mixer"]


def build_mixer(config: MixerConfig | BidirectionalConfig) -> TokenMixer:
    """The mixer that `config.kind` names, with fresh parameters."""
    if isinstance(config, SoftmaxConfig):
        return SoftmaxAttention(config)
    if isinstance(config, ScaleformerConfig):
        return ScaleformerAttention(config)
    if isinstance(config, BidirectionalConfig):
        return BidirectionalAttention(config)
    return RandomFeatureAttention(config)
