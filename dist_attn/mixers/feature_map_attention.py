"""Causal attention by a feature map: random features (RFA, RFA-Gate) and elu + 1."""

from abc import abstractmethod
from typing import final

import torch

from dist_attn.feature_maps import EluPlusOne
from dist_attn.mixers.heads import HeadInputs
from dist_attn.mixers.kernel_attention import CausalKernelAttention
from dist_attn.mixers.random_matrices import RandomFeatures
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
class RandomFeatureAttention(RandomFeatures, FeatureMapAttention):
    """Multi-head RFA: learned sigma per head, fixed random vectors; optional scalar gates.

    Reference: Random Feature Attention, Eq. 5 to 9; Eq. 12 (`weighting = "norm"`).
    """

    config: RandomFeatureConfig
    first_unit = 0.0  # no key weighs less than exp(0)

    def __init__(self, config: RandomFeatureConfig) -> None:
        super().__init__(config)
        self.hold_features()


@final
class EluAttention(FeatureMapAttention):
    """Multi-head attention whose weights are (elu(q) + 1) . (elu(k) + 1), as many features as a head has numbers.

    Reference: Katharopoulos et al. 2020, Transformers are RNNs, Eq. 7 and 18; gates as in RFA-Gate (Random Feature
    Attention, Eq. 7).
    """

    config: EluConfig

    def feature_map(self) -> FeatureMap:
        return EluPlusOne()
