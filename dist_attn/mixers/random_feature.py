"""Random feature attention, plain and gated (RFA and RFA-Gate)."""

from typing import final

import torch
from torch import nn

from dist_attn.feature_maps import ArcCosine, Gaussian
from dist_attn.mixers.config import RandomFeatureConfig
from dist_attn.mixers.kernel_attention import FeatureMapAttention
from dist_attn.mixers.key_weights import log_key_weights
from dist_attn.mixers.redraw import RandomMatrices
from dist_attn.ops import FeatureMap

__all__ = ["RandomFeatureAttention"]


@final
class RandomFeatureAttention(FeatureMapAttention, RandomMatrices):
    """Multi-head RFA: learned sigma per head, fixed random vectors; optional scalar gates.

    Queries and keys have unit norm, or keys the weights of those that have not.

    Reference: Random Feature Attention, Eq. 5 to 9; Eq. 12 (`weighting = "norm"`).
    """

    config: RandomFeatureConfig

    def __init__(self, config: RandomFeatureConfig) -> None:
        super().__init__(config)
        self.sigma_H1K = nn.Parameter(torch.full((config.num_heads, 1, config.head_size), config.first_sigma))
        self.hold_matrices()

    @property
    def num_features(self) -> int:
        return self.config.num_random * (2 if self.config.feature == "gaussian" else 1)

    def feature_map(self) -> FeatureMap:
        """phi with the learned sigma multiplied in (RFA Eq. 8); float32 always."""
        w_HDK = self.sigma_H1K * self.matrices()
        if self.config.feature == "gaussian":
            return Gaussian(w_HDK, unit_norm=self.config.weighting == "unit_norm")
        return ArcCosine(w_HDK, unit_norm=True)

    def log_key_weights(self, k: torch.Tensor) -> torch.Tensor | None:
        return log_key_weights(k, self.sigma_H1K) if self.config.weighting == "norm" else None

    def first_unit(self) -> float | None:
        """0: no key weighs less than exp(0)."""
        return 0.0 if self.config.weighting == "norm" else None
