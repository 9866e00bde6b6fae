"""Up-sampling over ranks: each rank gets the kept tokens around its own positions, and interpolates by itself."""

import torch

from dist_attn.comm import Communicator
from dist_attn.layout import SequenceLayout
from dist_attn.ops.upsampling import Interpolation, upsample
from dist_attn.sharded.block_table import Block, BlockTable
from dist_attn.sharded.redistribution import redistribute
from dist_attn.sharded.redistribution_plan import Change, plan_redistribution

__all__ = ["sharded_upsample"]


def sharded_upsample(
    comm: Communicator,
    source: SequenceLayout,
    found: SequenceLayout,
    even: SequenceLayout,
    z_ND: torch.Tensor,
    position_N: torch.Tensor,
    how: Interpolation,
) -> torch.Tensor:
    """`ops.upsampling.upsample` at this rank's positions of `source`.

    `found[r]` kept tokens lie at positions of rank r; they are held as `even` says. A rank takes those of its own
    positions and `how.reach` on either side, so that neighbours hold copies, whose gradients add up.

    Shapes: z [N local, D], position [N local] -> [L local, D].
    Cost: an all-to-all of the kept tokens that change ranks, at most N / P + found[r] + 2 reach rows each, and one of
        their positions.
    """
    target = BlockTable((found.total,), comm.size, tuple(_needed(source, found, how.reach)))
    owners = range(comm.size)
    held = BlockTable.grid([even.cuts], owners, comm.size)

    def around(rows_NC: torch.Tensor, label: str) -> torch.Tensor:
        # Every rank keeps its own part of the target: its positions lie there.
        plan = plan_redistribution((Change(held, target, rows_NC.shape[1]),), relabel=False)
        return redistribute(comm, plan, rows_NC, label=label)[0]

    near_ND = around(z_ND, "up-sampling")
    near_N = around(position_N[:, None], "positions of up-sampling")[:, 0]
    start, stop = source.range(comm.rank)
    return upsample(near_ND, near_N, torch.arange(start, stop, device=z_ND.device), how)


def _needed(source: SequenceLayout, found: SequenceLayout, reach: int) -> list[Block]:
    """For each rank the kept tokens that have a part in its positions; none for a rank without positions."""
    blocks = []
    for rank in range(source.size):
        start, stop = found.range(rank)
        around = (max(0, start - reach), min(found.total, stop + reach)) if source.lengths[rank] else (0, 0)
        blocks.append(Block(rank, (around,)))
    return blocks
