"""The diagonal state-space recurrence across ranks: one all-gather of states, folded with each rank's own decay.

A rank's tokens take a state x to a^n x + (what they leave by themselves), n being their number. All ranks know a and
every n, so only what is left by itself travels, and its size does not depend on the length.
"""

import torch

from dist_attn.comm import Communicator
from dist_attn.comm import differentiable as collectives
from dist_attn.layout import SequenceLayout
from dist_attn.ops import diagonal_scan
from dist_attn.ops.diagonal import absorb_inputs, power, state_types

__all__ = ["sharded_diagonal_scan"]


def sharded_diagonal_scan(
    comm: Communicator,
    layout: SequenceLayout,
    u_BLD: torch.Tensor,
    a_DN: torch.Tensor,
    b_DN: torch.Tensor,
    c_DN: torch.Tensor,
    *,
    state: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`ops.diagonal_scan` on this rank's slice.

    `state` is the one before the first global token, equal on all ranks; the state returned is the global final one,
    on every rank. Gradients of a, b, c and of the state are this rank's share.

    Shapes: as `ops.diagonal_scan`, L local, which may be 0.
    Cost: one all-gather of 8 B D N bytes per rank (16 for float64), its transpose backward; a second pass over the
        local inputs for the state they leave. One rank alone: nothing of both.
    """
    if comm.size == 1:
        return diagonal_scan(u_BLD, a_DN, b_DN, c_DN, state=state)
    real, kind = state_types(u_BLD, a_DN, b_DN, c_DN, state)
    own_BDN = absorb_inputs(u_BLD, a_DN, b_DN, like=real)
    gathered_PBDN = torch.view_as_complex(collectives.all_gather(comm, torch.view_as_real(own_BDN), label="carry"))
    prefixes = [torch.zeros_like(own_BDN) if state is None else state.to(kind)]
    for left_BDN, length in zip(gathered_PBDN.unbind(0), layout.lengths, strict=True):
        prefixes.append(power(a_DN.to(kind), length) * prefixes[-1] + left_BDN)
    # Stack, then pick: rank 0 needs nobody's state, but its graph must still reach the exchange.
    before_BDN = torch.stack(prefixes)[comm.rank]
    y_BLD, _ = diagonal_scan(u_BLD, a_DN, b_DN, c_DN, state=before_BDN)
    return y_BLD, prefixes[-1]
