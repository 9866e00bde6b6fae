"""The scan by one all-gather: every rank gets all elements and folds them from the first to the last."""

import torch

from dist_attn.comm import Communicator
from dist_attn.comm import differentiable as collectives
from dist_attn.sharded.prefix_scan.monoid import Monoid
from dist_attn.sharded.prefix_scan.steps import LABEL, Finish

__all__ = ["start"]


def start(comm: Communicator, monoid: Monoid, element_BHX: torch.Tensor) -> Finish:
    """Launch the exchange; waiting gives the elements before this rank, combined, and those of all ranks.

    The fold has the same order on every rank, so every rank computes the same total, bit for bit.

    Cost: (P - 1) |x| bytes in P - 1 messages, the whole exchange launched at once; backward a reduce-scatter of the
        same bytes. P elements in memory.
    """
    launched = collectives.all_gather_start(comm, element_BHX, label=LABEL)

    def finish() -> tuple[torch.Tensor, torch.Tensor]:
        prefixes = [torch.zeros_like(element_BHX)]
        for one_BHX in launched.wait().unbind(0):
            prefixes.append(monoid.combine(prefixes[-1], one_BHX))
        return prefixes[comm.rank], prefixes[-1]

    return finish
