"""What the shapes of queries, keys and values must have in common."""

import torch

from dist_attn.errors import ShapeError

__all__ = ["check_softmax_shapes"]


def check_softmax_shapes(q_BHLK: torch.Tensor, k_BGSK: torch.Tensor, v_BGSV: torch.Tensor) -> None:
    """Raises: ShapeError unless q, k and v fit together; nothing is broadcast."""
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
