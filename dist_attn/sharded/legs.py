"""The LegS memory across ranks: one all-gather of what each rank's tokens leave, and of how they make it forget.

A rank's tokens take the coefficients before them to (transition) c + (what they leave by themselves). The transition
over a stretch has its first column in common with a channel that begins as e_0 and hears nothing, and is known by it:
so one more channel travels in place of a matrix.
"""

import torch
import torch.nn.functional as F

from dist_attn.comm import Communicator
from dist_attn.comm import differentiable as collectives
from dist_attn.layout import SequenceLayout
from dist_attn.ops.legs import LegsState, absorb_signal, legs_memory, transition_of

__all__ = ["sharded_legs_memory"]


def sharded_legs_memory(
    comm: Communicator,
    layout: SequenceLayout,
    f_BLD: torch.Tensor,
    read_DN: torch.Tensor,
    *,
    state: LegsState | None = None,
) -> tuple[torch.Tensor, LegsState]:
    """`ops.legs_memory` on this rank's slice.

    `state` is the one before the first global token, equal on all ranks; the state returned is the global final one,
    on every rank. Gradients of the read-out and of the state are this rank's share.

    Shapes: as `ops.legs_memory`, L local, which may be 0.
    Cost: one all-gather of 8 B (D + 1) N bytes per rank, its transpose backward; a second pass over the local tokens
        for what they leave, and P B products with N x N matrices. One rank alone: nothing of both.
    """
    if comm.size == 1:
        return legs_memory(f_BLD, read_DN, state=state)
    batch, _, channels = f_BLD.shape
    size = read_DN.shape[1]
    first = LegsState.empty(batch, channels, size, device=f_BLD.device) if state is None else state
    seen_B = first.seen_B + layout.range(comm.rank)[0]
    silent_BEN = torch.zeros((batch, channels + 1, size), dtype=torch.float64, device=f_BLD.device)
    silent_BEN[:, -1, 0] = 1.0
    own_BEN = absorb_signal(F.pad(f_BLD, (0, 1)), LegsState(silent_BEN, seen_B)).c_BDN
    gathered_PBEN = collectives.all_gather(comm, own_BEN, label="carry")
    prefixes = [first.c_BDN.double()]
    for left_BEN in gathered_PBEN.unbind(0):
        transition_BNN = transition_of(left_BEN[:, -1].detach())
        prefixes.append(prefixes[-1] @ transition_BNN.mT + left_BEN[:, :-1])
    # Stack, then pick: rank 0 needs nobody's state, but its graph must still reach the exchange.
    before_BDN = torch.stack(prefixes)[comm.rank]
    y_BLD, _ = legs_memory(f_BLD, read_DN, state=LegsState(before_BDN, seen_B))
    return y_BLD, LegsState(prefixes[-1], first.seen_B + layout.total)
