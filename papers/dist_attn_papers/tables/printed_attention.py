"""Linear attention as papers print it: what is held is a running sum of all tokens' outer products, or of values.

Reference: Scaleformer (2023), Algorithms 1 and 2; Random Feature Attention, Eq. 6, for all tokens at once. Misprints of
the former are corrected here (an index off by one in W^horizon and V^after, the contraction of Algorithm 1), since the
wrong ones compute something else in the same time.
"""

import torch
import torch.nn.functional as F

__all__ = ["cumulative_sums", "printed_kernel", "printed_positions"]


def cumulative_sums(phi_q_BHLM: torch.Tensor, phi_k_BHLM: torch.Tensor, v_BHLV: torch.Tensor) -> torch.Tensor:
    """Causal linear attention, [L, M, V] for each head."""
    weights_BHL1 = (phi_q_BHLM * phi_k_BHLM.cumsum(2)).sum(-1, keepdim=True)
    return printed_kernel(phi_q_BHLM, phi_k_BHLM, v_BHLV, causal=True) / weights_BHL1


def printed_kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """Algorithm 1: the running sum of all outer products (L, d, d); not causal, Q (K^T V)."""
    if not causal:
        return q @ (k.transpose(-1, -2) @ v)
    summed = (k[..., :, None] * v[..., None, :]).cumsum(2)
    return (q[..., None, :] @ summed)[..., 0, :]


def printed_positions(q: torch.Tensor, v: torch.Tensor, rp: torch.Tensor, causal: bool) -> torch.Tensor:
    """Algorithm 2: running sums before and after the horizon, and V^horizon (L, 2k - 1, d) inside it.

    `rp` are embeddings of the relative positions -k to k, [1, 2k + 1, d].
    """
    length, reach = v.shape[2], rp.shape[1] // 2
    weights = q @ rp.transpose(-1, -2)
    cumulated = v.cumsum(2)
    before = weights[..., :1] * F.pad(cumulated, (0, 0, reach, 0))[:, :, :length]
    ahead = 0 if causal else reach - 1
    horizon = F.pad(v, (0, 0, reach - 1, ahead)).unfold(2, reach + ahead, 1)
    inside = torch.einsum("bhlj,bhldj->bhld", weights[..., 1 : reach + 1 + ahead], horizon.contiguous())
    if causal:
        return before + inside
    later = v.sum(2, keepdim=True) - F.pad(cumulated, (0, 0, 1, 0))
    later = F.pad(later, (0, 0, 0, reach))[:, :, reach : reach + length]
    return before + inside + weights[..., -1:] * later
