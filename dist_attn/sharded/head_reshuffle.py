"""Exact softmax attention across ranks: every rank takes all tokens of some heads, attends, and gives them back.

Heads are attended one after the other, so the memory above inputs and outputs is that of one head.
Reference: A Unified View of Long-Sequence Models, Sec. 10.4 (all-to-all head reshuffle).
"""

import torch

from dist_attn.comm import Communicator
from dist_attn.errors import ShapeError
from dist_attn.layout import SequenceLayout
from dist_attn.ops import softmax_attention
from dist_attn.sharded.reshuffle import columns_to_tokens, tokens_to_columns

__all__ = ["sharded_softmax_attention"]


def sharded_softmax_attention(
    comm: Communicator,
    layout: SequenceLayout,
    q_BHLK: torch.Tensor,
    k_BGLK: torch.Tensor,
    v_BGLV: torch.Tensor,
    *,
    causal: bool,
    scale: float | None = None,
) -> torch.Tensor:
    """`ops.softmax_attention` on this rank's slice; queries and keys lie on the same layout.

    Shapes: as `ops.softmax_attention`, L local.
    Cost: two all-to-alls; per rank and batch element (P - 1) / P of L local (H K + G K + G V) elements there and of
        L local H V back.
    """
    batch, heads, length, size = q_BHLK.shape
    groups, values = k_BGLK.shape[1], v_BGLV.shape[3]
    if not groups or heads % groups:
        raise ShapeError(f"{heads} query heads over {groups} key heads; the key heads must divide the query heads")
    repeats = heads // groups
    # q, k and v travel in one exchange: one row per key head and token holds its query heads, its key and its value.
    q_GLBN = q_BHLK.unflatten(1, (groups, repeats)).permute(1, 3, 0, 2, 4).flatten(3)
    k_GLBN, v_GLBN = k_BGLK.permute(1, 2, 0, 3), v_BGLV.permute(1, 2, 0, 3)
    rows_GLN = torch.cat([q_GLBN, k_GLBN, v_GLBN], dim=3).flatten(2)
    mine_GTN = tokens_to_columns(comm, layout, rows_GLN, label="heads")
    own = mine_GTN.shape[0]
    q, k, v = mine_GTN.unflatten(2, (batch, repeats * size + size + values)).split(
        (repeats * size, size, values), dim=3
    )
    outs = [
        softmax_attention(
            q[g].unflatten(2, (repeats, size)).permute(1, 2, 0, 3),
            k[g].transpose(0, 1)[:, None],
            v[g].transpose(0, 1)[:, None],
            causal=causal,
            scale=size**-0.5 if scale is None else scale,
        )
        for g in range(own)
    ]
    # With no head of its own a rank still joins the way back, forward and backward, with zero rows of its graph.
    out_GBRTV = torch.stack(outs) if outs else v.new_empty((0, batch, repeats, layout.total, values)) + v.sum()
    out_GTN = out_GBRTV.permute(0, 3, 1, 2, 4).flatten(2)
    back_GLN = columns_to_tokens(comm, layout, out_GTN, groups, label="heads back")
    out_BGRLV = back_GLN.reshape(groups, length, batch, repeats, values).permute(2, 0, 3, 1, 4)
    return out_BGRLV.flatten(1, 2)
