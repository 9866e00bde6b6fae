"""Attention of a sequence to itself that sees all keys.

Letters: B batch, H heads, L queries on this rank, S keys, K head size, V values per head, M features, D model width.
"""

from abc import ABC, abstractmethod
from typing import final

import torch
from torch import nn

from dist_attn.feature_maps import EluPlusOne
from dist_attn.mixers.base import Paradigm, WholeSequenceMixer
from dist_attn.mixers.heads import (
    HeadInputs,
    RelativeRows,
    merge_heads,
    split_heads,
    stable_key_weights,
)
from dist_attn.mixers.linear_layers import Linear
from dist_attn.mixers.random_matrices import RandomFeatures
from dist_attn.model_config.mixers.attention import ATTENTIONS, AttentionConfig, BidirectionalConfig
from dist_attn.model_config.mixers.heads import DenominatorConfig
from dist_attn.model_config.registry import load_build
from dist_attn.ops import Denominator, FeatureMap, LinearState, SequenceOps, linear_attention_read
from dist_attn.ops.running_maximum import NO_TOKENS


class AllKeys(nn.Module, ABC):
    """Attention of queries over all keys."""

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__()
        self.config = config

    @abstractmethod
    def forward(
        self, q_BHLK: torch.Tensor, k_BHSK: torch.Tensor, v_BHSV: torch.Tensor, ops: SequenceOps
    ) -> tuple[torch.Tensor, LinearState | None]:
        """The outputs [B, H, L, V] and, where there is one, the state that all keys of all ranks leave behind."""


def build_attention(config: AttentionConfig) -> AllKeys:
    """Build the attention that the configuration names."""
    attend: AllKeys = load_build(ATTENTIONS.find(config.attention).build)(config)
    return attend


@final
class SoftmaxOverAllKeys(AllKeys):
    """Exact attention, perhaps with relative positions.

    Reference: Shaw et al. 2018 (relative positions).
    """

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__(config)
        self.relative: RelativeRows | None = None
        if config.relative is not None:
            sizes = (config.num_heads, config.head_size, config.value_size)
            self.relative = RelativeRows(config.relative, *sizes, causal=False)

    def forward(
        self, q_BHLK: torch.Tensor, k_BHSK: torch.Tensor, v_BHSV: torch.Tensor, ops: SequenceOps
    ) -> tuple[torch.Tensor, LinearState | None]:
        relative = None if self.relative is None else self.relative()
        return ops.softmax_attention(q_BHLK, k_BHSK, v_BHSV, causal=False, relative=relative), None


class KernelOverAllKeys(AllKeys):
    """Attention by a kernel: all keys leave a state of constant size behind."""

    divisor = DenominatorConfig(kind="exact", eps=0.0)  # where a configuration says none

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__(config)
        policy = self.divisor if config.denominator is None else config.denominator
        self.denominator = Denominator(policy.kind, policy.eps)

    def feature_map(self) -> FeatureMap | None:
        """phi, with what is learned of it; None where queries and keys are features already."""
        return None

    def log_key_weights(self, k_BHSK: torch.Tensor) -> torch.Tensor | None:
        """The logs of the keys' weights, [B, H, S], or None where all keys weigh the same."""
        return None

    def forward(
        self, q_BHLK: torch.Tensor, k_BHSK: torch.Tensor, v_BHSV: torch.Tensor, ops: SequenceOps
    ) -> tuple[torch.Tensor, LinearState | None]:
        log_gate = key_scale = None
        weights_BHS = self.log_key_weights(k_BHSK)
        if weights_BHS is not None:
            # Also where all keys are seen: documents and ranks have their own largest weight, and one rule serves all.
            unit_BH = torch.full(k_BHSK.shape[:2], NO_TOKENS, dtype=torch.float64, device=k_BHSK.device)
            log_gate, key_scale, _ = stable_key_weights(weights_BHS, ops, unit_BH)
        return self.attend(HeadInputs(q_BHLK, k_BHSK, v_BHSV, log_gate, key_scale), ops)

    def attend(self, heads: HeadInputs, ops: SequenceOps) -> tuple[torch.Tensor, LinearState]:
        """`forward`, by keys with their weights."""
        return ops.linear_attention(
            heads.q,
            heads.k,
            heads.v,
            feature_map=self.feature_map(),
            log_gate_BHS=heads.log_gate,
            key_scale_BHS=heads.key_scale,
            causal=False,
            denominator=self.denominator,
        )

    def read(self, q_BHLK: torch.Tensor, sums: LinearState) -> torch.Tensor:
        """The outputs [B, H, L, V] of later queries, from the state that all keys left behind."""
        return linear_attention_read(q_BHLK, sums, feature_map=self.feature_map(), denominator=self.denominator)


@final
class EluOverAllKeys(KernelOverAllKeys):
    """Attention by elu + 1, whose positive weights are divided as they are.

    Reference: Katharopoulos et al. 2020.
    """

    def feature_map(self) -> FeatureMap:
        return EluPlusOne()


class RandomFeaturesOverAllKeys(RandomFeatures, KernelOverAllKeys):
    """Random feature attention.

    Reference: Random Feature Attention, Eq. 5 or 12 and Algorithm 2, with sigma of Eq. 8.
    """

    config: AttentionConfig
    divisor = DenominatorConfig()

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__(config)
        self.hold_features()


@final
class BidirectionalAttention(WholeSequenceMixer):
    """Multi-head attention over all tokens by any kernel; it takes a sequence whole and cannot be streamed.

    Reference: Random Feature Attention, Eq. 5; Introduction to Transformers, Sec. 3.
    """

    paradigm = Paradigm.LEARNED_DEPENDENT
    name = "bidirectional attention"

    def __init__(self, config: BidirectionalConfig) -> None:
        super().__init__()
        self.config = config
        size = config.hidden_size
        self.qkv = Linear(size, sum(config.qkv_sizes), bias=config.projection_bias)
        self.out = Linear(config.qkv_sizes[2], size, bias=config.projection_bias)
        self.attend = build_attention(config)

    def mix(self, x_BLD: torch.Tensor, ops: SequenceOps) -> torch.Tensor:
        q, k, v = (split_heads(t, self.config.num_heads) for t in self.qkv(x_BLD).split(self.config.qkv_sizes, dim=-1))
        out_BHLV, _ = self.attend(q, k, v, ops)
        mixed_BLD: torch.Tensor = self.out(merge_heads(out_BHLV))
        return mixed_BLD
