"""Selection of tokens over ranks: which are kept is found from a few scores, then ranks get equally many kept tokens.

Counts of all ranks say where each rank's kept tokens stand among all; one exchange spreads them evenly, in order.
For up-sampling each rank gets the kept tokens around its own positions, and interpolates by itself.
"""

from dataclasses import dataclass

import torch

from dist_attn.comm import Communicator
from dist_attn.layout import SequenceLayout
from dist_attn.ops.device import send, take_rows
from dist_attn.ops.sequence_ops import SequenceOps
from dist_attn.ops.token_selection import (
    Interpolation,
    SelectionCall,
    check_selection,
    comparable,
    first_of_highest,
    highest_scores,
    share_of_highest,
    upsample,
)
from dist_attn.sharded.block_table import BlockTable, TableBlock
from dist_attn.sharded.redistribution import realign_tokens, redistribute
from dist_attn.sharded.redistribution_plan import Change, plan_redistribution
from dist_attn.sharded.sequence_ops import ShardedSequenceOps
from dist_attn.sharded.sharding import Sharding, over_ranks


@dataclass(frozen=True)
class ShardedSelection:
    """This rank's share of the kept tokens, held as `layout` says; by their positions they lie as `found` says."""

    x_NC: torch.Tensor
    position_N: torch.Tensor
    ops: SequenceOps
    comm: Communicator
    source: SequenceLayout
    found: SequenceLayout
    layout: SequenceLayout

    @property
    def total(self) -> int:
        """Kept tokens on all ranks."""
        return self.layout.total

    def upsample(self, z_ND: torch.Tensor, how: Interpolation) -> torch.Tensor:
        """`ops.token_selection.upsample` at this rank's positions of `source`.

        A rank takes the kept tokens of its own positions and `how.reach` on either side, so that neighbours hold
        copies, whose gradients add up.

        Shapes: z [N local, D] -> [L local, D].
        Cost: an all-to-all of the kept tokens that change ranks, at most N / P + found.lengths[r] + 2 reach rows each,
            and one of their positions.
        """
        comm = self.comm
        target = BlockTable((self.found.total,), comm.size, tuple(_needed(self.source, self.found, how.reach)))
        held = BlockTable.grid([self.layout.cuts], range(comm.size), comm.size)

        def around(rows_NC: torch.Tensor, label: str) -> torch.Tensor:
            # Every rank keeps its own part of the target: its positions lie there.
            plan = plan_redistribution((Change(held, target, rows_NC.shape[1]),), relabel=False)
            return redistribute(comm, plan, rows_NC, label=label)[0]

        near_ND = around(z_ND, "up-sampling")
        near_N = around(self.position_N[:, None], "positions of up-sampling")[:, 0]
        start, stop = self.source.range(comm.rank)
        return upsample(near_ND, near_N, torch.arange(start, stop, device=z_ND.device), how)


@over_ranks(SelectionCall)
def sharded_select_tokens(sharding: Sharding, call: SelectionCall) -> ShardedSelection:
    """`ops.token_selection.select_tokens` of this rank's slice.

    Shapes: x [L local, C], score [L local] -> this rank's even share of the kept [N, C], [N].
    Cost: an all-gather of 2 numbers; with more candidates than `at_most`, one of that many scores from each rank; an
        all-to-all of the kept rows that change ranks, and one of their positions. 2 small agreements of layouts.
    Raises: as the local form.
    """
    comm, layout, x_LC, score_L, at_most = sharding.comm, sharding.layout, call.x_LC, call.score_L, call.at_most
    check_selection(x_LC, score_L, at_most)
    own_N, counts = _chosen(comm, layout, comparable(score_L), call.threshold, at_most)
    position_N = own_N + layout.range(comm.rank)[0]
    found = SequenceLayout.from_lengths(counts)
    even = SequenceLayout.even(found.total, comm.size)

    def spread(rows_NC: torch.Tensor, label: str) -> torch.Tensor:
        return realign_tokens(comm, found, even, rows_NC[None, None], label=label)[0, 0]

    rows_NC = spread(take_rows(x_LC, own_N), "kept tokens")
    positions_N = spread(position_N[:, None], "kept positions")[:, 0]
    ops = ShardedSequenceOps(
        comm,
        even,
        softmax=sharding.softmax,
        exchange=sharding.exchange,
        cache=sharding.cache,
        implementation=sharding.implementation,
    )
    return ShardedSelection(rows_NC, positions_N, ops, comm, layout, found, even)


def _chosen(
    comm: Communicator, layout: SequenceLayout, score_L: torch.Tensor, threshold: float, at_most: int | None
) -> tuple[torch.Tensor, list[int]]:
    """Places of the tokens kept here, rising, and how many each rank keeps; every rank decides by the same numbers."""
    own_N = (score_L >= threshold).nonzero()[:, 0]
    best = score_L.max().double() if len(score_L) else score_L.new_tensor(-torch.inf, dtype=torch.float64)
    told_2 = torch.stack([torch.full_like(best, len(own_N)), best])
    told_P2 = comm.all_gather(told_2, label="candidates").cpu()
    counts = [int(count) for count in told_P2[:, 0].tolist()]
    if not sum(counts):
        # All are below the threshold: the best token stays, on the first rank that has it.
        ranks = [rank for rank, length in enumerate(layout.lengths) if length]
        winner = max(ranks, key=told_P2[:, 1].tolist().__getitem__, default=-1)
        own_N = first_of_highest(score_L) if winner == comm.rank else own_N
        return own_N, [int(rank == winner) for rank in range(comm.size)]
    if at_most is None or sum(counts) <= at_most:
        return own_N, counts
    kept = _share_of_ranks(comm, score_L[own_N], counts, at_most)
    return own_N[share_of_highest(score_L[own_N], kept[comm.rank])], kept


def _share_of_ranks(comm: Communicator, score_N: torch.Tensor, counts: list[int], at_most: int) -> list[int]:
    """Count each rank's candidates among the `at_most` highest of all; of equal ones earlier ranks' come first."""
    width = min(max(counts), at_most)
    padded_W = score_N.new_full((width,), -torch.inf)
    highest_N = highest_scores(score_N, width)
    padded_W[: len(highest_N)] = highest_N
    scores_PW = comm.all_gather(padded_W, label="highest scores")
    limit = scores_PW.flatten().topk(at_most).values[-1]
    # A score may be -inf as well, or no number and counted so: what only fills a row up is equal to none.
    counts_P1 = send(torch.tensor(counts, device="cpu"), scores_PW.device)[:, None]
    given_PW = torch.arange(width, device=scores_PW.device) < counts_P1
    above_P = (scores_PW > limit).sum(dim=1).tolist()
    equal_P = ((scores_PW == limit) & given_PW).sum(dim=1).tolist()
    left, kept = at_most - sum(above_P), []
    for above, equal in zip(above_P, equal_P, strict=True):
        kept.append(above + min(equal, left))
        left -= kept[-1] - above
    return kept


def _needed(source: SequenceLayout, found: SequenceLayout, reach: int) -> list[TableBlock]:
    """For each rank the kept tokens that have a part in its positions; none for a rank without positions."""
    blocks = []
    for rank in range(source.size):
        start, stop = found.range(rank)
        around = (max(0, start - reach), min(found.total, stop + reach)) if source.lengths[rank] else (0, 0)
        blocks.append(TableBlock(rank, (around,)))
    return blocks
