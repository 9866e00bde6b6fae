"""The oracle of softmax attention: the whole score matrix, by definition."""

import math

import torch

from dist_attn.ops.softmax_attention.placement import Placement

__all__ = ["softmax_attention_naive"]


def softmax_attention_naive(
    q_BHLK: torch.Tensor,
    k_BGSK: torch.Tensor,
    v_BGSV: torch.Tensor,
    *,
    causal: bool,
    scale: float | None = None,
    placement: Placement | None = None,
    prefix: int = 0,
) -> torch.Tensor:
    """softmax(scale q k^T) v with the score matrix in memory; see `softmax_attention`."""
    repeats = q_BHLK.shape[1] // k_BGSK.shape[1]
    k_BHSK, v_BHSV = k_BGSK.repeat_interleave(repeats, 1), v_BGSV.repeat_interleave(repeats, 1)
    scores_BHLS = q_BHLK @ k_BHSK.transpose(-1, -2) * (1 / math.sqrt(q_BHLK.shape[3]) if scale is None else scale)
    if placement is not None:
        hidden_LS = placement.hidden(causal=causal).to(q_BHLK.device)
        # Queries that see nothing: any finite scores do, since their weights are set to zero.
        blind_L1 = hidden_LS.all(dim=-1, keepdim=True)
        scores_BHLS = scores_BHLS.masked_fill(hidden_LS & ~blind_L1, float("-inf"))
        return scores_BHLS.softmax(dim=-1).masked_fill(blind_L1, 0.0) @ v_BHSV
    if causal:
        future_LS = torch.ones(scores_BHLS.shape[-2:], dtype=torch.bool, device=q_BHLK.device).triu(1)
        future_LS[:prefix, :prefix] = False
        scores_BHLS = scores_BHLS.masked_fill(future_LS, float("-inf"))
    return scores_BHLS.softmax(dim=-1) @ v_BHSV
