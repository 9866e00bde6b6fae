"""The scan by recursive doubling: in step k each rank swaps the total of its block of 2^k ranks with the next block's.

Reference: Hillis and Steele, Data Parallel Algorithms (1986); the form for any operator that need not commute is that
of MPI_Scan over recursive doubling.
"""

import torch

from dist_attn.comm import Communicator
from dist_attn.comm import differentiable as collectives
from dist_attn.sharded.prefix_scan.monoid import Monoid
from dist_attn.sharded.prefix_scan.steps import LABEL, Finish, from_one, swap, swap_start

__all__ = ["start"]


def start(comm: Communicator, monoid: Monoid, element_BHX: torch.Tensor) -> Finish:
    """Launch the first step; waiting does the others and gives the elements before this rank and of all, combined.

    Where P is not a power of two the upper blocks have gaps: the ranks before the last have no whole total then, and
    get it from the last.

    Cost: ceil(log2 P) steps, |x| bytes in 1 message in each step in which rank ^ 2^k is a rank; unless P is a power of
        two, also a broadcast of |x| from the last rank. Backward the same, the broadcast an all-reduce.
    """
    first = swap_start(comm, element_BHX, comm.rank ^ 1)

    def finish() -> tuple[torch.Tensor, torch.Tensor]:
        before_BHX, block_BHX = torch.zeros_like(element_BHX), element_BHX
        distance = 1
        received_BHX = from_one(first.wait())
        while True:
            if comm.rank & distance:
                before_BHX = monoid.combine(received_BHX, before_BHX)
                block_BHX = monoid.combine(received_BHX, block_BHX)
            else:
                block_BHX = monoid.combine(block_BHX, received_BHX)
            distance *= 2
            if distance >= comm.size:
                break
            received_BHX = swap(comm, block_BHX, comm.rank ^ distance)
        if comm.size & (comm.size - 1):
            block_BHX = collectives.broadcast(comm, block_BHX, comm.size - 1, label=LABEL)
        return before_BHX, block_BHX

    return finish
