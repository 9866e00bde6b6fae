"""Causal attention by a feature map: random features (RFA, RFA-Gate) and elu + 1."""

from abc import abstractmethod
from typing import final

import torch
from torch import nn

from dist_attn.feature_maps import EluPlusOne
from dist_attn.mixers.heads import HeadInputs, log_key_weights
from dist_attn.mixers.kernel_attention import CausalKernelAttention
from dist_attn.mixers.random_matrices import RandomMatrices, random_features
from dist_attn.model_config.mixers.kernels import EluConfig, RandomFeatureConfig
from dist_attn.ops import FeatureMap, LinearState, SequenceOps, linear_attention_step


class FeatureMapAttention(CausalKernelAttention):
    """phi(q) . S / (phi(q) . z), where one phi serves queries and keys; a kind of it says which."""

    @abstractmethod
    def feature_map(self) -> FeatureMap:
        """phi, with what is learned of it."""

    def attend(self, heads: HeadInputs, ops: SequenceOps, state: LinearState) -> tuple[torch.Tensor, LinearState]:
        return ops.linear_attention(
            heads.q,
            heads.k,
            heads.v,
            feature_map=self.feature_map(),
            log_gate_BHS=heads.log_gate,
            key_scale_BHS=heads.key_scale,
            causal=True,
            state=state,
            denominator=self.denominator,
        )

    def attend_step(self, heads: HeadInputs, state: LinearState) -> tuple[torch.Tensor, LinearState]:
        return linear_attention_step(
            heads.q,
            heads.k,
            heads.v,
            state,
            feature_map=self.feature_map(),
            log_gate_BH=heads.log_gate,
            key_scale_BH=heads.key_scale,
            denominator=self.denominator,
        )


@final
class RandomFeatureAttention(FeatureMapAttention, RandomMatrices):
    """Multi-head RFA: learned sigma per head, fixed random vectors; optional scalar gates.

    Queries and keys are scaled to unit norm, or neither is and keys have weights by their norms.

    Reference: Random Feature Attention, Eq. 5 to 9; Eq. 12 (`weighting = "norm"`).
    """

    config: RandomFeatureConfig
    first_unit = 0.0  # no key weighs less than exp(0)

    def __init__(self, config: RandomFeatureConfig) -> None:
        super().__init__(config)
        self.sigma_H1K = nn.Parameter(torch.full((config.num_heads, 1, config.head_size), config.first_sigma))
        self.hold_matrices()

    def feature_map(self) -> FeatureMap:
        """phi with the learned sigma multiplied in (RFA Eq. 8); float32 always."""
        return random_features(self.config, self.sigma_H1K * self.matrices())

    def log_key_weights(self, k: torch.Tensor) -> torch.Tensor | None:
        return log_key_weights(k, self.sigma_H1K) if self.config.weighting == "norm" else None


@final
class EluAttention(FeatureMapAttention):
    """Multi-head attention whose weights are (elu(q) + 1) . (elu(k) + 1), as many features as a head has numbers.

    Reference: Katharopoulos et al. 2020, Transformers are RNNs, Eq. 7 and 18; gates as in RFA-Gate (Random Feature
    Attention, Eq. 7).
    """

    config: EluConfig

    def feature_map(self) -> FeatureMap:
        return EluPlusOne()
