"""The kernels of attention that sees all keys: feature maps with learned scales, and relative positions."""

import torch
from torch import nn

from dist_attn.feature_maps import ArcCosine, EluPlusOne, Gaussian, elu_plus_one
from dist_attn.mixers.config import BidirectionalConfig, CrossConfig, DenominatorConfig
from dist_attn.mixers.relative import RelativeRows
from dist_attn.ops import Denominator, FeatureMap, LinearState, SequenceOps

__all__ = ["AllKeys"]


class AllKeys(nn.Module):
    """Attention of queries over all keys, by the kernel that the configuration names.

    Reference: Random Feature Attention, Eq. 5 and Algorithm 2 (`rfa`, with sigma of Eq. 8); Katharopoulos et al. 2020
    (`elu`); Scaleformer, Eq. 9 (`scaleformer`); Shaw et al. 2018 (`softmax` with relative positions).
    """

    w_HDK: torch.Tensor

    def __init__(self, config: BidirectionalConfig | CrossConfig) -> None:
        super().__init__()
        self.config = config
        heads, head_size = config.num_heads, config.head_size
        policy = config.denominator
        if policy is None:
            policy = DenominatorConfig() if config.attention == "rfa" else DenominatorConfig(kind="exact", eps=0.0)
        self.denominator = Denominator(policy.kind, policy.eps)
        if config.attention == "rfa":
            self.sigma_H1K = nn.Parameter(torch.ones(heads, 1, head_size))
            generator = torch.Generator().manual_seed(config.seed)
            self.register_buffer("w_HDK", torch.randn(heads, config.num_random, head_size, generator=generator))
        if config.attention == "scaleformer":
            self.positions_HRK = nn.Parameter(0.02 * torch.randn(heads, 2 * config.reach + 1, head_size))
        self.relative: RelativeRows | None = None
        if config.relative is not None:
            self.relative = RelativeRows(config.relative, heads, head_size, config.value_size, causal=False)

    def feature_map(self) -> FeatureMap:
        """phi of `rfa`, with the learned sigma multiplied in, or of `elu`."""
        if self.config.attention != "rfa":
            return EluPlusOne()
        w_HDK = self.sigma_H1K * self.w_HDK
        return Gaussian(w_HDK, unit_norm=True) if self.config.feature == "gaussian" else ArcCosine(w_HDK, True)

    def forward(
        self, q_BHLK: torch.Tensor, k_BHSK: torch.Tensor, v_BHSV: torch.Tensor, ops: SequenceOps
    ) -> tuple[torch.Tensor, LinearState | None]:
        """The outputs [B, H, L, V] and, for `rfa` and `elu`, the state that all keys of all ranks leave behind."""
        match self.config.attention:
            case "softmax":
                relative = None if self.relative is None else self.relative()
                return ops.softmax_attention(q_BHLK, k_BHSK, v_BHSV, causal=False, relative=relative), None
            case "scaleformer":
                phi_q, phi_k, phi_rp = (elu_plus_one(t) for t in (q_BHLK, k_BHSK, self.positions_HRK))
                return ops.relative_attention(phi_q, phi_k, v_BHSV, phi_rp, causal=False), None
        return ops.linear_attention(
            q_BHLK,
            k_BHSK,
            v_BHSV,
            feature_map=self.feature_map(),
            causal=False,
            denominator=self.denominator,
        )
