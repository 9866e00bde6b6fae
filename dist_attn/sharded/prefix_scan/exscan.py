"""The scan that a back end offers itself: over MPI one `Iexscan` with the combine of states as its operator."""

import torch

from dist_attn.comm import Communicator
from dist_attn.comm import differentiable as collectives
from dist_attn.sharded.prefix_scan.monoid import Monoid
from dist_attn.sharded.prefix_scan.scan_gradient import before_start
from dist_attn.sharded.prefix_scan.steps import LABEL, Finish

__all__ = ["start"]


def start(comm: Communicator, monoid: Monoid, element_BHX: torch.Tensor) -> Finish:
    """Launch the scan; waiting gives the elements before this rank, combined, and those of all ranks.

    An exclusive scan leaves out the last element: the last rank adds it and sends the total to all, so that all have
    the same bits. MPI may combine in any order that keeps the ranks' order: other exchanges give the same to rounding.

    Cost: |x| bytes in 1 message from each rank but the last, (P - 1) |x| in P - 1 messages from the last; MPI's own
        messages, about log2 P of |x| in as many steps, are not to be seen. Over other back ends P - 1 steps. Backward
        an all-reduce of |x| and a scan from the last rank of |x| and one number more in each row.
    """
    running = before_start(comm, monoid, element_BHX, label=LABEL)

    def finish() -> tuple[torch.Tensor, torch.Tensor]:
        before_BHX = running.wait()
        total_BHX = monoid.combine(before_BHX, element_BHX)
        return before_BHX, collectives.broadcast(comm, total_BHX, comm.size - 1, label=LABEL)

    return finish
