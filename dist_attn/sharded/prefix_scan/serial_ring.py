"""The scan as it is defined, one rank after the other: the oracle of the other exchanges."""

import torch

from dist_attn.comm import Communicator
from dist_attn.comm import differentiable as collectives
from dist_attn.sharded.prefix_scan.monoid import Monoid
from dist_attn.sharded.prefix_scan.steps import LABEL, Finish

__all__ = ["start"]


def start(comm: Communicator, monoid: Monoid, element_BHX: torch.Tensor) -> Finish:
    """Launch nothing; waiting gives the elements before this rank, combined, and those of all ranks.

    Cost: P - 1 steps of |x| bytes, of which each rank but the last sends one, then a broadcast from the last.
    """

    def finish() -> tuple[torch.Tensor, torch.Tensor]:
        before_BHX = torch.zeros_like(element_BHX)
        for sender in range(comm.size - 1):
            message_BHX = monoid.combine(before_BHX, element_BHX)
            send = {sender + 1: 1} if comm.rank == sender else {}
            recv = {sender: 1} if comm.rank == sender + 1 else {}
            rows = collectives.send_receive(comm, message_BHX[None][: len(send)], send, recv, label=LABEL)
            before_BHX = before_BHX + rows.sum(0)
        total_BHX = monoid.combine(before_BHX, element_BHX)
        return before_BHX, collectives.broadcast(comm, total_BHX, comm.size - 1, label=LABEL)

    return finish
