"""Exact softmax attention through PyTorch's fused kernels."""

import torch
import torch.nn.functional as F

from dist_attn.errors import ShapeError

__all__ = ["softmax_attention"]


def softmax_attention(
    q_BHLK: torch.Tensor,
    k_BGSK: torch.Tensor,
    v_BGSV: torch.Tensor,
    *,
    causal: bool,
    scale: float | None = None,
) -> torch.Tensor:
    """softmax(scale q k^T) v, exact; scale defaults to K^-1/2. G key heads serve H query heads (G divides H).

    Causal is aligned at the top left: query t sees keys <= t, also when L != S.
    Shapes: q [B, H, L, K], k [B, G, S, K], v [B, G, S, V] -> [B, H, L, V].
    Raises: ShapeError when shapes do not fit together.
    Reference: Random Feature Attention, Eq. 1.
    """
    given = f"q {tuple(q_BHLK.shape)}, k {tuple(k_BGSK.shape)}, v {tuple(v_BGSV.shape)}"
    if not q_BHLK.dim() == k_BGSK.dim() == v_BGSV.dim() == 4:
        raise ShapeError(f"{given}: all three need four dimensions [batch, heads, length, size]")
    heads, groups = q_BHLK.shape[1], k_BGSK.shape[1]
    if k_BGSK.shape[:3] != v_BGSV.shape[:3] or not groups or heads % groups:
        raise ShapeError(
            f"{given}: k and v need equal batch, heads and length, and their heads must divide the query heads"
        )
    if (q_BHLK.shape[0], q_BHLK.shape[3]) != (k_BGSK.shape[0], k_BGSK.shape[3]):
        raise ShapeError(f"{given}: q and k need equal batch and equal size per head")
    if not q_BHLK.shape[2]:
        return q_BHLK.new_zeros((*q_BHLK.shape[:3], v_BGSV.shape[3]))
    return F.scaled_dot_product_attention(
        q_BHLK, k_BGSK, v_BGSV, is_causal=causal, scale=scale, enable_gqa=heads != groups
    )
