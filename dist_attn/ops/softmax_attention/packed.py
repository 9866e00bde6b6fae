"""Exact softmax attention inside each of many packed documents: several short ones at a time, long ones one by one."""

import torch
import torch.nn.functional as F

from dist_attn.ops.documents import (
    check_documents,
    document_groups,
    document_numbers,
    same_document,
    split_tokens,
    start_flags,
)
from dist_attn.ops.softmax_attention.fused import softmax_attention
from dist_attn.ops.softmax_attention.placement import Placement
from dist_attn.ops.softmax_attention.relative import RelativePositions
from dist_attn.ops.softmax_attention.shapes import check_softmax_shapes

__all__ = ["packed_softmax_attention"]

# So many tokens of whole documents share one masked score matrix.
TOGETHER_TOKENS = 256


def packed_softmax_attention(
    q_BHLK: torch.Tensor,
    k_BGLK: torch.Tensor,
    v_BGLV: torch.Tensor,
    *,
    causal: bool,
    documents: tuple[int, ...],
    scale: float | None = None,
    relative: RelativePositions | None = None,
) -> torch.Tensor:
    """`softmax_attention` in which every document attends to itself alone.

    Shapes: q [B, H, L, K], k [B, G, L, K], v [B, G, L, V] -> [B, H, L, V].
    Cost: one call of a fused kernel per 256 tokens of short documents and per long document; with relative positions
        the tiles that touch a document.
    Raises: ShapeError when shapes do not fit together.
    """
    check_softmax_shapes(q_BHLK, k_BGLK, v_BGLV)
    heads, length = q_BHLK.shape[1:3]
    check_documents(documents, length, k_BGLK.shape[2])
    if relative is not None:
        tokens_L, number_L = torch.arange(length), document_numbers(documents, length)
        placement = Placement(tokens_L, tokens_L, number_L, number_L)
        return softmax_attention(
            q_BHLK, k_BGLK, v_BGLV, causal=causal, scale=scale, placement=placement, relative=relative
        )
    flags_L = start_flags(documents, length, q_BHLK.device)
    starts = frozenset(documents)
    outs = []
    groups = document_groups(documents, length, TOGETHER_TOKENS)
    parts = split_tokens((q_BHLK, k_BGLK, v_BGLV), groups)
    for (start, stop), (q, k, v) in zip(groups, parts, strict=True):
        assert q is not None and k is not None and v is not None
        if starts.isdisjoint(range(start + 1, stop)):
            outs.append(softmax_attention(q, k, v, causal=causal, scale=scale))
            continue
        seen_TT = same_document(flags_L[start:stop])
        seen_TT = seen_TT.tril() if causal else seen_TT
        grouped = heads != k.shape[1]
        outs.append(F.scaled_dot_product_attention(q, k, v, attn_mask=seen_TT, scale=scale, enable_gqa=grouped))
    if not outs:
        # No tokens, but of the inputs' graph: an empty rank's backward pass must find its way too.
        nothing = q_BHLK.sum() + k_BGLK.sum() + v_BGLV.sum()
        return v_BGLV.new_zeros((*q_BHLK.shape[:3], v_BGLV.shape[3])) + nothing
    return torch.cat(outs, dim=2)
