"""The oracle of softmax attention: the whole score matrix, by definition.

Shape letters: B batch, H query heads, G key heads, L queries, S keys, K head size, V values, R rows of relative
positions.
"""

import math

import torch

from dist_attn.ops.softmax_attention.call import Placement, RelativePositions


def softmax_attention_naive(
    q_BHLK: torch.Tensor,
    k_BGSK: torch.Tensor,
    v_BGSV: torch.Tensor,
    *,
    causal: bool,
    scale: float | None = None,
    placement: Placement | None = None,
    prefix: int = 0,
    window: int | None = None,
    softcap: float | None = None,
    sinks_H: torch.Tensor | None = None,
    relative: RelativePositions | None = None,
) -> torch.Tensor:
    """softmax(scale q k^T) v with the score matrix in memory; see `softmax_attention` and `SoftmaxOptions`."""
    repeats = q_BHLK.shape[1] // k_BGSK.shape[1]
    k_BHSK, v_BHSV = k_BGSK.repeat_interleave(repeats, 1), v_BGSV.repeat_interleave(repeats, 1)
    scores_BHLS = q_BHLK @ k_BHSK.transpose(-1, -2) * (1 / math.sqrt(q_BHLK.shape[3]) if scale is None else scale)
    where = Placement.in_order(q_BHLK.shape[2], k_BGSK.shape[2]) if placement is None else placement
    where = where.on(q_BHLK.device)
    if relative is not None:
        row_LS = (where.keys_S - where.queries_L[:, None]).clamp(-relative.reach, relative.reach) + relative.reach
        near_BHLS = (q_BHLK[:, :, :, None] * relative.keys_HRK[:, row_LS]).sum(-1)
        scores_BHLS = scores_BHLS + near_BHLS * (1 / math.sqrt(q_BHLK.shape[3]) if scale is None else scale)
    if softcap is not None:
        scores_BHLS = softcap * torch.tanh(scores_BHLS / softcap)
    hidden_LS = where.hidden(causal=causal)
    hidden_LS[:prefix, :prefix] = False
    if window is not None:
        hidden_LS |= where.keys_S <= where.queries_L[:, None] - window
    # Queries that see nothing: any finite scores do, since their weights are set to zero.
    blind_L1 = hidden_LS.all(dim=-1, keepdim=True)
    scores_BHLS = scores_BHLS.masked_fill(hidden_LS & ~blind_L1, float("-inf"))
    if sinks_H is not None:
        sinks_BHL1 = sinks_H[:, None, None].expand(*scores_BHLS.shape[:3], 1)
        scores_BHLS = torch.cat([scores_BHLS, sinks_BHL1], dim=-1)
    weights_BHLS = scores_BHLS.softmax(dim=-1)[..., : k_BGSK.shape[2]].masked_fill(blind_L1, 0.0)
    out_BHLV = weights_BHLS @ v_BHSV
    if relative is not None and relative.values_HRV is not None:
        out_BHLV = out_BHLV + (weights_BHLS[..., None] * relative.values_HRV[:, row_LS]).sum(dim=3)
    return out_BHLV
