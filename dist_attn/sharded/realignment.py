"""Tokens from one layout to another: each rank gets those at the positions of its own slice of the other layout."""

import torch

from dist_attn.comm import Communicator
from dist_attn.comm import differentiable as collectives
from dist_attn.layout import SequenceLayout

__all__ = ["realign_tokens"]


def realign_tokens(
    comm: Communicator, source: SequenceLayout, target: SequenceLayout, x_BHLN: torch.Tensor, *, label: str
) -> torch.Tensor:
    """The tokens at the positions of this rank's slice of `target`; fewer where `source` ends before.

    Tokens behind the end of `target` stay where they are.

    Shapes: x [B, H, L of source, N] -> [B, H, at most L of target, N].
    Cost: one all-to-all of the tokens that change ranks, each of them once; nothing for equal layouts.
    """
    if source.cuts == target.cuts:
        return x_BHLN
    batch, heads, _, numbers = x_BHLN.shape
    mine = source.range(comm.rank)
    wanted = target.range(comm.rank)
    send = [_common(mine, target.range(rank)) for rank in range(comm.size)]
    receive = [_common(source.range(rank), wanted) for rank in range(comm.size)]
    rows_TN = x_BHLN[:, :, : sum(send)].permute(2, 0, 1, 3).reshape(sum(send), batch * heads * numbers)
    moved_TN = collectives.all_to_all(comm, rows_TN, send, receive, label=label)
    return moved_TN.reshape(sum(receive), batch, heads, numbers).permute(1, 2, 0, 3)


def _common(a: tuple[int, int], b: tuple[int, int]) -> int:
    return max(0, min(a[1], b[1]) - max(a[0], b[0]))
