"""Attention of a sequence to itself that sees all keys.

Letters: B batch, H heads, L queries on this rank, S keys, K head size, V values per head, M features, D model width.
"""

from typing import NoReturn, final

import torch
from torch import nn

from dist_attn.errors import InputError
from dist_attn.feature_maps import EluPlusOne, PositiveRatios, elu_plus_one
from dist_attn.mixers.base import MixerState, Paradigm, TokenMixer
from dist_attn.mixers.efficient import efficient_attention, log_key_sizes, query_features
from dist_attn.mixers.heads import (
    HeadInputs,
    RelativeRows,
    log_key_weights,
    log_positive_weights,
    merge_heads,
    split_heads,
    stable_key_weights,
)
from dist_attn.mixers.random_matrices import RandomMatrices, random_features
from dist_attn.mixers.whole_sequence import NoState
from dist_attn.model_config.mixers.attention import RANDOM_KERNELS, AttentionConfig, BidirectionalConfig
from dist_attn.model_config.mixers.heads import DenominatorConfig
from dist_attn.ops import (
    Denominator,
    FeatureMap,
    LinearState,
    SequenceOps,
    linear_attention_read,
)
from dist_attn.ops.relative_attention import relative_attention
from dist_attn.ops.running_maximum import NO_TOKENS

# Where a configuration says none. The weights of all but rfa are positive: those of elu are divided as they are, the
# rest may underflow together.
NEVER_ZERO = DenominatorConfig(kind="floor", eps=1e-12)
DIVISORS = {"rfa": DenominatorConfig(), "performer": NEVER_ZERO, "efficient": NEVER_ZERO}


class AllKeys(RandomMatrices):
    """Attention of queries over all keys, by the kernel that the configuration names.

    Reference: Random Feature Attention, Eq. 5 or 12 and Algorithm 2 (`rfa`, with sigma of Eq. 8); Katharopoulos et al.
    2020 (`elu`); Choromanski et al. 2021, Eq. 7 (`performer`); Shen et al. 2021 (`efficient`); Scaleformer, Eq. 9
    (`scaleformer`); Shaw et al. 2018 (`softmax` with relative positions).
    """

    config: AttentionConfig

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__()
        self.config = config
        heads, head_size = config.num_heads, config.head_size
        policy = config.denominator
        if policy is None:
            policy = DIVISORS.get(config.attention, DenominatorConfig(kind="exact", eps=0.0))
        self.denominator = Denominator(policy.kind, policy.eps)
        if config.attention == "rfa":
            self.sigma_H1K = nn.Parameter(torch.full((heads, 1, head_size), config.first_sigma))
        if config.attention in RANDOM_KERNELS:
            self.hold_matrices()
        if config.attention == "scaleformer":
            self.positions_HRK = nn.Parameter(0.02 * torch.randn(heads, 2 * config.reach + 1, head_size))
        self.relative: RelativeRows | None = None
        if config.relative is not None:
            self.relative = RelativeRows(config.relative, heads, head_size, config.value_size, causal=False)

    def feature_map(self) -> FeatureMap:
        """phi of `rfa`, with the learned sigma multiplied in, of `performer`, or of `elu`."""
        if self.config.attention == "performer":
            return PositiveRatios(self.config.softmax_scale * self.matrices())
        if self.config.attention != "rfa":
            return EluPlusOne()
        return random_features(self.config, self.sigma_H1K * self.matrices())

    def forward(
        self, q_BHLK: torch.Tensor, k_BHSK: torch.Tensor, v_BHSV: torch.Tensor, ops: SequenceOps
    ) -> tuple[torch.Tensor, LinearState | None]:
        """The outputs [B, H, L, V] and, where there is one, the state that all keys of all ranks leave behind."""
        match self.config.attention:
            case "softmax":
                relative = None if self.relative is None else self.relative()
                return ops.softmax_attention(q_BHLK, k_BHSK, v_BHSV, causal=False, relative=relative), None
            case "scaleformer":
                phi_q, phi_k, phi_rp = (elu_plus_one(t) for t in (q_BHLK, k_BHSK, self.positions_HRK))
                return relative_attention(phi_q, phi_k, v_BHSV, phi_rp, causal=False, ops=ops), None
        log_gate = key_scale = None
        weights_BHS = self._log_key_weights(k_BHSK)
        if weights_BHS is not None:
            # Also where all keys are seen: documents and ranks have their own largest weight, and one rule serves all.
            unit_BH = torch.full(k_BHSK.shape[:2], NO_TOKENS, dtype=torch.float64, device=k_BHSK.device)
            log_gate, key_scale, _ = stable_key_weights(weights_BHS, ops, unit_BH)
        if self.config.attention == "efficient":
            heads = HeadInputs(q_BHLK, k_BHSK, v_BHSV, log_gate, key_scale)
            return efficient_attention(heads, ops, causal=False, denominator=self.denominator)
        return ops.linear_attention(
            q_BHLK,
            k_BHSK,
            v_BHSV,
            feature_map=self.feature_map(),
            log_gate_BHS=log_gate,
            key_scale_BHS=key_scale,
            causal=False,
            denominator=self.denominator,
        )

    def read(self, q_BHLK: torch.Tensor, sums: LinearState) -> torch.Tensor:
        """The outputs [B, H, L, V] of later queries, from the state that all keys left behind."""
        feature_map = None
        if self.config.attention == "efficient":
            q_BHLK = query_features(q_BHLK, (sums.z_BHM / sums.mass_BH[..., None])[:, :, None])
        else:
            feature_map = self.feature_map()
        return linear_attention_read(q_BHLK, sums, feature_map=feature_map, denominator=self.denominator)

    def _log_key_weights(self, k_BHSK: torch.Tensor) -> torch.Tensor | None:
        """None where all keys weigh the same."""
        if self.config.attention == "performer":
            scale = self.config.softmax_scale
            return log_positive_weights(k_BHSK, scale * self.matrices(), scale)
        if self.config.attention == "efficient":
            return log_key_sizes(k_BHSK)
        return log_key_weights(k_BHSK, self.sigma_H1K) if self.config.weighting == "norm" else None


@final
class BidirectionalAttention(TokenMixer):
    """Multi-head attention over all tokens by any kernel; it takes a sequence whole and cannot be streamed.

    Reference: Random Feature Attention, Eq. 5; Scaleformer, Eq. 9 without a mask; Introduction to Transformers, Sec. 3.
    """

    paradigm = Paradigm.LEARNED_DEPENDENT

    def __init__(self, config: BidirectionalConfig) -> None:
        super().__init__()
        self.config = config
        size = config.hidden_size
        self.qkv = nn.Linear(size, sum(config.qkv_sizes), bias=config.projection_bias)
        self.out = nn.Linear(config.qkv_sizes[2], size, bias=config.projection_bias)
        self.attend = AllKeys(config)

    def forward(
        self, x_BLD: torch.Tensor, ops: SequenceOps, state: MixerState | None = None
    ) -> tuple[torch.Tensor, NoState]:
        if state is not None and not isinstance(state, NoState):
            raise InputError(f"a {type(state).__name__} was given to bidirectional attention, which takes no state")
        q, k, v = (split_heads(t, self.config.num_heads) for t in self.qkv(x_BLD).split(self.config.qkv_sizes, dim=-1))
        out_BHLV, _ = self.attend(q, k, v, ops)
        return self.out(merge_heads(out_BHLV)), NoState()

    def step(self, x_BD: torch.Tensor, state: MixerState) -> NoReturn:
        raise InputError("bidirectional attention sees later tokens too and has no step; take a causal mixer to decode")

    def initial_state(self, batch: int) -> NoState:
        return NoState()
