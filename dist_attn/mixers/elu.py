"""Causal linear attention with the feature map elu + 1, plain or gated: no randomness, nothing estimated."""

from typing import final

from dist_attn.feature_maps import EluPlusOne
from dist_attn.mixers.config import EluConfig
from dist_attn.mixers.kernel_attention import FeatureMapAttention
from dist_attn.ops import FeatureMap

__all__ = ["EluAttention"]


@final
class EluAttention(FeatureMapAttention):
    """Multi-head attention whose weights are (elu(q) + 1) . (elu(k) + 1), as many features as a head has numbers.

    Reference: Katharopoulos et al. 2020, Transformers are RNNs, Eq. 7 and 18; gates as in RFA-Gate (Random Feature
    Attention, Eq. 7).
    """

    config: EluConfig

    @property
    def num_features(self) -> int:
        return self.config.head_size

    def feature_map(self) -> FeatureMap:
        return EluPlusOne()
