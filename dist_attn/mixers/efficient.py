"""Causal efficient attention: queries by a softmax over features, keys by one over the tokens so far."""

from typing import final

import torch

from dist_attn.mixers.feature_softmax import efficient_attention, key_ratios, log_key_sizes, query_features
from dist_attn.mixers.kernel_attention import CausalKernelAttention
from dist_attn.model_config.mixers.kernels import EfficientConfig
from dist_attn.ops import LinearState, SequenceOps
from dist_attn.ops.running_maximum import NO_TOKENS


@final
class EfficientAttention(CausalKernelAttention):
    """Multi-head efficient attention; each feature of a query reads its own mean of the values so far.

    The keys' softmax is over the sequence, here up to the token that asks, and is carried by its maximum and its sums.
    Attention `efficient` of encoders and over a memory is the paper's, over all tokens.

    Reference: Shen et al. 2021, Efficient Attention: Attention with Linear Complexities, Sec. 3.
    """

    config: EfficientConfig

    @property
    def num_features(self) -> int:
        return self.config.head_size

    def log_key_weights(self, k: torch.Tensor) -> torch.Tensor:
        return log_key_sizes(k)

    def first_unit(self) -> float:
        """Key weights may be as small as they like."""
        return NO_TOKENS

    def attend(
        self,
        q_BHLK: torch.Tensor,
        k_BHLK: torch.Tensor,
        v_BHLV: torch.Tensor,
        ops: SequenceOps,
        state: LinearState,
        log_gate_BHL: torch.Tensor | None,
        key_scale_BHL: torch.Tensor | None,
    ) -> tuple[torch.Tensor, LinearState]:
        return efficient_attention(
            q_BHLK,
            k_BHLK,
            v_BHLV,
            ops,
            log_gate_BHS=log_gate_BHL,
            key_scale_BHS=key_scale_BHL,
            causal=True,
            denominator=self.denominator,
            state=state,
        )

    def attend_step(
        self,
        q_BHK: torch.Tensor,
        k_BHK: torch.Tensor,
        v_BHV: torch.Tensor,
        state: LinearState,
        log_gate_BH: torch.Tensor | None,
        key_scale_BH: torch.Tensor | None,
    ) -> tuple[torch.Tensor, LinearState]:
        after = state.advance(key_ratios(k_BHK), v_BHV, log_gate_BH=log_gate_BH, key_scale_BH=key_scale_BH)
        mass_BH1 = after.mass_BH[..., None]
        num_BH1V, den_BH1 = after.read(query_features(q_BHK, after.z_BHM / mass_BH1)[:, :, None])
        return self.denominator.divide(num_BH1V, den_BH1, mass_BH1).squeeze(2).to(v_BHV.dtype), after
