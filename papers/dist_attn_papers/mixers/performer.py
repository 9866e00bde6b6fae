"""Attention by positive random features (Performer), causal and over all keys."""

import math
from dataclasses import dataclass
from typing import final

import torch

from dist_attn.feature_maps import project
from dist_attn.mixers.all_keys import KernelOverAllKeys
from dist_attn.mixers.feature_map_attention import FeatureMapAttention
from dist_attn.mixers.random_matrices import RandomMatrices
from dist_attn.model_config.mixers.attention import AttentionConfig
from dist_attn.model_config.mixers.heads import DenominatorConfig
from dist_attn.ops import FeatureMap
from dist_attn.ops.device import without_autocast
from dist_attn_papers.mixers.positive_configs import PerformerConfig

PROJECTED_TOKENS = 512  # by random vectors at a time


def positive_ratios(x_BHLK: torch.Tensor, w_HDK: torch.Tensor) -> torch.Tensor:
    """Positive features relative to the largest of each token, D^-1/2 exp(w x - max w x): none above D^-1/2.

    `positive` is exp(max w x - |x|^2 / 2) times this. Of a query that factor cancels in attention, of a key it is a
    weight that can be carried as a logarithm.

    Shapes: x [B, H, L, K], w [H, D, K] -> [B, H, L, D].
    """
    exponent = project(x_BHLK, w_HDK)
    # A constant: the factor that is taken out here is put back elsewhere, so their product does not depend on it.
    return (exponent - exponent.detach().amax(dim=-1, keepdim=True)).exp() * (1.0 / math.sqrt(w_HDK.shape[1]))


@dataclass(frozen=True, eq=False)
class PositiveRatios:
    """`positive_ratios` as a frozen callable."""

    w_HDK: torch.Tensor

    def __call__(self, x_BHLK: torch.Tensor) -> torch.Tensor:
        return positive_ratios(x_BHLK, self.w_HDK)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.w_HDK,)

    def with_tensors(self, *tensors: torch.Tensor) -> "PositiveRatios":
        (w_HDK,) = tensors
        return PositiveRatios(w_HDK)


def log_positive_weights(k: torch.Tensor, w_HDK: torch.Tensor, scale: float) -> torch.Tensor:
    """max_d w_d k - |scale k|^2 / 2 of each key, in float32 or wider; k is [B, H, S, K], or [B, H, K] for one token.

    `w` has the scale in it already. The maximum is a constant here, as in `positive_ratios`, which divides
    by it.

    Reference: Choromanski et al. 2021, Rethinking Attention with Performers, Lemma 1, with the stabiliser for keys.
    """
    if k.dim() == 3:
        return log_positive_weights(k[:, :, None], w_HDK, scale).squeeze(2)
    with without_autocast(k.device):
        keys = k.to(torch.promote_types(k.dtype, torch.float32))
        with torch.no_grad():
            w_HKD = w_HDK.to(keys.dtype).transpose(1, 2)
            largest = [(part @ w_HKD).amax(dim=-1) for part in keys.split(PROJECTED_TOKENS, dim=2)]
        return torch.cat(largest, dim=2) - 0.5 * (scale * keys).square().sum(dim=-1)


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

    def feature_map(self) -> FeatureMap:
        """The ratios of positive features, with softmax's temperature in the random vectors."""
        return PositiveRatios(self.config.softmax_scale * self.matrices())

    def log_key_weights(self, k: torch.Tensor) -> torch.Tensor:
        scale = self.config.softmax_scale
        return log_positive_weights(k, scale * self.matrices(), scale)


@final
class PerformerOverAllKeys(KernelOverAllKeys, RandomMatrices):
    """`PerformerAttention` over all keys."""

    config: AttentionConfig
    divisor = DenominatorConfig(kind="floor", eps=1e-12)  # weights may underflow together

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__(config)
        self.hold_matrices()

    def feature_map(self) -> FeatureMap:
        return PositiveRatios(self.config.softmax_scale * self.matrices())

    def log_key_weights(self, k_BHSK: torch.Tensor) -> torch.Tensor:
        scale = self.config.softmax_scale
        return log_positive_weights(k_BHSK, scale * self.matrices(), scale)
