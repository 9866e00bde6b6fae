"""The oracle of softmax attention: the whole score matrix, by definition."""

import math

import torch

__all__ = ["softmax_attention_naive"]


def softmax_attention_naive(
    q_BHLK: torch.Tensor,
    k_BGSK: torch.Tensor,
    v_BGSV: torch.Tensor,
    *,
    causal: bool,
    scale: float | None = None,
) -> torch.Tensor:
    """softmax(scale q k^T) v with the score matrix in memory; see `softmax_attention`."""
    repeats = q_BHLK.shape[1] // k_BGSK.shape[1]
    k_BHSK, v_BHSV = k_BGSK.repeat_interleave(repeats, 1), v_BGSV.repeat_interleave(repeats, 1)
    scores_BHLS = q_BHLK @ k_BHSK.transpose(-1, -2) * (1 / math.sqrt(q_BHLK.shape[3]) if scale is None else scale)
    if causal:
        future_LS = torch.ones(scores_BHLS.shape[-2:], dtype=torch.bool, device=q_BHLK.device).triu(1)
        scores_BHLS = scores_BHLS.masked_fill(future_LS, float("-inf"))
    return scores_BHLS.softmax(dim=-1) @ v_BHSV
