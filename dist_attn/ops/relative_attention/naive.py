"""The oracle of relative attention: the whole score matrix of Scaleformer Eq. 9 to 11, by definition.

Shape letters: B batch, H heads, L queries, S keys, K features, V values, R = 2 k + 1 rows of relative positions.
"""

import torch


def relative_attention_naive(
    phi_q_BHLK: torch.Tensor,
    phi_k_BHSK: torch.Tensor,
    v_BHSV: torch.Tensor,
    phi_rp_HRK: torch.Tensor,
    *,
    causal: bool,
) -> torch.Tensor:
    """Scores phi(q_i).phi(k_j) + phi(q_i).phi(rp)_{clip(j - i, -k, k) + k}, divided by their row sums; O(L S).

    A query with no weight on any key, as one that sees none, has the output 0.
    """
    queries, keys, device = phi_q_BHLK.shape[2], phi_k_BHSK.shape[2], phi_q_BHLK.device
    reach = phi_rp_HRK.shape[1] // 2
    distance_LS = torch.arange(keys, device=device)[None, :] - torch.arange(queries, device=device)[:, None]
    row_LS = distance_LS.clamp(-reach, reach) + reach
    scores_BHLS = phi_q_BHLK @ phi_k_BHSK.transpose(-1, -2)
    positions_BHLR = phi_q_BHLK @ phi_rp_HRK.transpose(-1, -2)
    scores_BHLS = scores_BHLS + positions_BHLR.gather(-1, row_LS.expand_as(scores_BHLS))
    if causal:
        scores_BHLS = scores_BHLS.masked_fill(distance_LS > 0, 0.0)
    sums_BHL1 = scores_BHLS.sum(-1, keepdim=True)
    weights_BHLS = scores_BHLS / torch.where(sums_BHL1 == 0, torch.ones_like(sums_BHL1), sums_BHL1)
    return weights_BHLS.masked_fill(sums_BHL1 == 0, 0.0) @ v_BHSV
