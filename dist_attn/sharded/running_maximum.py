"""The running maximum across ranks: one small message from each, and every rank goes on from the ranks before it."""

import torch

from dist_attn.comm import Communicator
from dist_attn.comm import differentiable as collectives
from dist_attn.layout import SequenceLayout
from dist_attn.ops.running_maximum import Element, Maxima, join, maxima, scan_elements

__all__ = ["sharded_running_maximum"]


def sharded_running_maximum(
    comm: Communicator,
    layout: SequenceLayout,
    x_BHS: torch.Tensor,
    before_BH: torch.Tensor,
    *,
    log_gate_BHS: torch.Tensor | None = None,
) -> Maxima:
    """`ops.running_maximum` on this rank's slice; `before` is the one before the first global token.

    The maximum after is that after the last global token, on every rank.

    Cost: an all-gather of 16 B H bytes, forward alone.
    """
    documents = layout.documents_on(comm.rank)
    scanned = scan_elements(x_BHS, log_gate_BHS, documents)
    with torch.no_grad():
        own = Element(torch.zeros_like(before_BH), torch.full_like(before_BH, -torch.inf))  # of no tokens
        if x_BHS.shape[2]:
            own = Element(scanned.decay[..., -1], scanned.level[..., -1])
        message_2BH = torch.stack([own.decay.double(), own.level.double()])
        elements_P2BH = collectives.all_gather(comm, message_2BH, label="running maximum")
        start = after = before_BH.detach().double()
        for rank, (decay, level) in enumerate(elements_P2BH.unbind()):
            after = join(Element(torch.zeros_like(after), after), Element(decay, level)).level
            if rank < comm.rank:
                start = after
    return maxima(scanned, start, documents)._replace(after_BH=after)
