"""Exact softmax attention across ranks whose first tokens see each other fully: two attentions, one for each part."""

from typing import Protocol

import torch

from dist_attn.comm import Communicator
from dist_attn.layout import SequenceLayout
from dist_attn.ops import RelativePositions

__all__ = ["SoftmaxAcrossRanks", "sharded_prefix_softmax"]


class SoftmaxAcrossRanks(Protocol):
    """Exact attention over layouts, however keys and queries meet."""

    def __call__(
        self,
        comm: Communicator,
        layout: SequenceLayout,
        q_BHLK: torch.Tensor,
        k_BGSK: torch.Tensor,
        v_BGSV: torch.Tensor,
        *,
        causal: bool,
        scale: float | None,
        memory_layout: SequenceLayout | None,
        relative: RelativePositions | None,
    ) -> torch.Tensor: ...


def sharded_prefix_softmax(
    attention: SoftmaxAcrossRanks,
    comm: Communicator,
    layout: SequenceLayout,
    memory: SequenceLayout,
    q_BHLK: torch.Tensor,
    k_BGSK: torch.Tensor,
    v_BGSV: torch.Tensor,
    *,
    scale: float | None,
    prefix: int,
    relative: RelativePositions | None = None,
) -> torch.Tensor:
    """`ops.softmax_attention` with a prefix of global tokens, on this rank's slice.

    Cost: that of causal attention over all tokens and of full attention over the prefix; the causal rows of the prefix
        are computed and dropped.
    """
    queries, keys = (SequenceLayout(tuple(min(cut, prefix) for cut in part.cuts)) for part in (layout, memory))
    here, there = queries.lengths[comm.rank], keys.lengths[comm.rank]
    first = attention(
        comm,
        queries,
        q_BHLK[:, :, :here],
        k_BGSK[:, :, :there],
        v_BGSV[:, :, :there],
        causal=False,
        scale=scale,
        memory_layout=keys,
        relative=relative,
    )
    rest = attention(
        comm, layout, q_BHLK, k_BGSK, v_BGSV, causal=True, scale=scale, memory_layout=memory, relative=relative
    )
    return torch.cat([first, rest[:, :, here:]], dim=2)
