"""Causal attention by positive random features, an unbiased estimate of softmax attention (Performer)."""

from typing import final

import torch

from dist_attn.feature_maps import PositiveRatios
from dist_attn.mixers.config import PerformerConfig
from dist_attn.mixers.kernel_attention import FeatureMapAttention
from dist_attn.mixers.key_weights import log_positive_weights
from dist_attn.mixers.redraw import RandomMatrices
from dist_attn.ops import FeatureMap
from dist_attn.ops.running_maximum import NO_TOKENS

__all__ = ["PerformerAttention"]


@final
class PerformerAttention(FeatureMapAttention, RandomMatrices):
    """Multi-head attention whose weights estimate exp(q.k / sqrt(K)): features exp(w x - |x|^2 / 2) of x / K^(1/4).

    Every token's features are taken relative to its largest one. Of a query that factor cancels; of a key it is a
    weight, held relative to the largest so far (docs/decisions/0010): exact, without a look at later keys, and the same
    over ranks, in a stream and step by step.

    Reference: Choromanski et al. 2021, Rethinking Attention with Performers, Eq. 7 (FAVOR+).
    """

    config: PerformerConfig

    def __init__(self, config: PerformerConfig) -> None:
        super().__init__(config)
        self.hold_matrices()

    @property
    def num_features(self) -> int:
        return self.config.num_random

    def feature_map(self) -> FeatureMap:
        """The ratios of positive features, with softmax's temperature in the random vectors."""
        return PositiveRatios(self.config.softmax_scale * self.matrices())

    def log_key_weights(self, k: torch.Tensor) -> torch.Tensor:
        scale = self.config.softmax_scale
        return log_positive_weights(k, scale * self.matrices(), scale)

    def first_unit(self) -> float:
        """Key weights may be as small as they like."""
        return NO_TOKENS
