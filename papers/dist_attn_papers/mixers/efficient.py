"""Efficient attention: queries by a softmax over their features, keys by one over the sequence, as linear attention.

Feature m of the query at t reads the mean of the values by the weights exp(k_m) of the keys that t sees. Relative to
the largest number of each key and to the largest key so far, with S and z the sums of linear attention and w its mass,

    y_t = sum_m softmax(q_t)_m S_tm / z_tm = phi(q_t) . S_t / (phi(q_t) . z_t),   phi(q_t)_m = softmax(q_t)_m w_t / z_tm

since phi(q_t) . z_t is w_t. The means z_t / w_t are a linear attention themselves: that of keys without features over
the ratios as values. So both walk, stream and travel over ranks as linear attention does.
"""

from typing import final

import torch

from dist_attn.mixers.all_keys import KernelOverAllKeys
from dist_attn.mixers.heads import HeadInputs
from dist_attn.mixers.kernel_attention import CausalKernelAttention
from dist_attn.model_config.mixers.heads import DenominatorConfig
from dist_attn.ops import Denominator, LinearState, SequenceOps
from dist_attn_papers.mixers.positive_configs import EfficientConfig

# One maximum serves all features of a head: one whose keys are all this far below the largest so far counts for less
# than it should, down to nothing; the inverse and its gradients are still numbers in float32.
LEAST_MEAN = 1.8e-35  # exp(-80)


def log_key_sizes(k: torch.Tensor) -> torch.Tensor:
    """The largest number of each key, [..., K] -> [...], in float32 or wider: the log of its weight, a constant."""
    return k.detach().to(torch.promote_types(k.dtype, torch.float32)).amax(dim=-1)


def key_ratios(k: torch.Tensor) -> torch.Tensor:
    """exp(k) relative to the largest number of each key, in float32 or wider."""
    keys = k.to(torch.promote_types(k.dtype, torch.float32))
    return (keys - keys.detach().amax(dim=-1, keepdim=True)).exp()


def query_features(q: torch.Tensor, means: torch.Tensor) -> torch.Tensor:
    """softmax(q) / means over the features, by logarithms: neither the quotient nor its gradients overflow."""
    queries = q.to(torch.promote_types(q.dtype, torch.float32))
    return (queries.log_softmax(dim=-1) - means.clamp_min(LEAST_MEAN).log()).exp()


def efficient_attention(
    heads: HeadInputs,
    ops: SequenceOps,
    *,
    causal: bool,
    denominator: Denominator,
    state: LinearState | None = None,
) -> tuple[torch.Tensor, LinearState]:
    """Efficient attention, by gates and key scales that have `log_key_sizes` in them, and the state of all keys.

    Shapes: q [B, H, L, K], k [B, H, S, K], v [B, H, S, V] -> [B, H, L, V]; the state has K features.
    Cost: O((L + S) K V); across ranks the exchanges of two states, of K (V + 1) + 2 and of K + 3 numbers per head.
    Reference: Shen et al. 2021, Efficient Attention: Attention with Linear Complexities, Eq. 4 with softmax; a causal
        form sums over the keys so far.
    """
    ratios_BHSK = key_ratios(heads.k)
    one_feature = ratios_BHSK.new_ones((1, 1, 1, 1))
    means_BHLK, _ = ops.linear_attention(
        one_feature.expand(*heads.q.shape[:3], 1),
        one_feature.expand(*heads.k.shape[:3], 1),
        ratios_BHSK,
        causal=causal,
        denominator=Denominator("floor", 0.0),
        state=None if state is None else _sums_of_ratios(state),
        log_gate_BHS=heads.log_gate,
        key_scale_BHS=heads.key_scale,
    )
    out_BHLV, after = ops.linear_attention(
        query_features(heads.q, means_BHLK),
        ratios_BHSK,
        heads.v.to(ratios_BHSK.dtype),
        causal=causal,
        denominator=denominator,
        state=state,
        log_gate_BHS=heads.log_gate,
        key_scale_BHS=heads.key_scale,
    )
    return out_BHLV.to(heads.v.dtype), after


def _sums_of_ratios(state: LinearState) -> LinearState:
    """The state of the means: its sums are the z of the other, and its own z is the mass."""
    return LinearState(
        state.z_BHM[:, :, None], state.mass_BH[..., None], state.mass_BH, state.log_decay_BH, state.reset_BH
    )


@final
class EfficientAttention(CausalKernelAttention):
    """Multi-head efficient attention; each feature of a query reads its own mean of the values so far.

    The keys' softmax is over the sequence, here up to the token that asks, and is carried by its maximum and its sums.

    Reference: Shen et al. 2021, Efficient Attention: Attention with Linear Complexities, Sec. 3.
    """

    config: EfficientConfig

    def log_key_weights(self, k: torch.Tensor) -> torch.Tensor:
        return log_key_sizes(k)

    def attend(self, heads: HeadInputs, ops: SequenceOps, state: LinearState) -> tuple[torch.Tensor, LinearState]:
        return efficient_attention(heads, ops, causal=True, denominator=self.denominator, state=state)

    def attend_step(self, heads: HeadInputs, state: LinearState) -> tuple[torch.Tensor, LinearState]:
        after = state.advance(key_ratios(heads.k), heads.v, log_gate_BH=heads.log_gate, key_scale_BH=heads.key_scale)
        mass_BH1 = after.mass_BH[..., None]
        num_BH1V, den_BH1 = after.read(query_features(heads.q, after.z_BHM / mass_BH1)[:, :, None])
        return self.denominator.divide(num_BH1V, den_BH1, mass_BH1).squeeze(2).to(heads.v.dtype), after


@final
class EfficientOverAllKeys(KernelOverAllKeys):
    """The paper's efficient attention, whose keys' softmax is over all tokens.

    Reference: Shen et al. 2021, Efficient Attention: Attention with Linear Complexities, Sec. 3.
    """

    divisor = DenominatorConfig(kind="floor", eps=1e-12)  # weights may underflow together

    def log_key_weights(self, k_BHSK: torch.Tensor) -> torch.Tensor:
        return log_key_sizes(k_BHSK)

    def attend(self, heads: HeadInputs, ops: SequenceOps) -> tuple[torch.Tensor, LinearState]:
        return efficient_attention(heads, ops, causal=False, denominator=self.denominator)

    def read(self, q_BHLK: torch.Tensor, sums: LinearState) -> torch.Tensor:
        means_BH1M = (sums.z_BHM / sums.mass_BH[..., None])[:, :, None]
        return super().read(query_features(q_BHLK, means_BH1M), sums)
