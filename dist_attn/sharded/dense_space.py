"""The recurrence with a full matrix across ranks: one all-gather of states, folded with each rank's own powers."""

import torch

from dist_attn.comm import Communicator
from dist_attn.comm import differentiable as collectives
from dist_attn.layout import SequenceLayout
from dist_attn.ops.dense_space import absorb_dense_inputs, dense_scan, matrix_power

__all__ = ["sharded_dense_scan"]


def sharded_dense_scan(
    comm: Communicator,
    layout: SequenceLayout,
    u_BLD: torch.Tensor,
    a_DNN: torch.Tensor,
    b_DN: torch.Tensor,
    c_DMN: torch.Tensor,
    *,
    state: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`ops.dense_scan` on this rank's slice.

    `state` is the one before the first global token, equal on all ranks; the state returned is the global final one,
    on every rank. Gradients of a, b, c and of the state are this rank's share.

    Shapes: as `ops.dense_scan`, L local, which may be 0.
    Cost: one all-gather of 4 B D N bytes per rank (8 for float64), its transpose backward; a second pass over the
        local inputs for the state they leave, and A to the power of every rank's length. One rank alone: nothing.
    """
    if comm.size == 1:
        return dense_scan(u_BLD, a_DNN, b_DN, c_DMN, state=state)
    like = c_DMN.dtype if state is None else torch.promote_types(c_DMN.dtype, state.dtype)
    own_BDN = absorb_dense_inputs(u_BLD, a_DNN, b_DN, like=torch.promote_types(like, torch.float32))
    gathered_PBDN = collectives.all_gather(comm, own_BDN, label="carry")
    prefixes = [torch.zeros_like(own_BDN) if state is None else state.to(own_BDN.dtype)]
    with torch.autocast(u_BLD.device.type, enabled=False):
        for left_BDN, length in zip(gathered_PBDN.unbind(0), layout.lengths, strict=True):
            decay_DNN = matrix_power(a_DNN.to(own_BDN.dtype), length)
            prefixes.append(torch.einsum("dnm,bdm->bdn", decay_DNN, prefixes[-1]) + left_BDN)
    # Stack, then pick: rank 0 needs nobody's state, but its graph must still reach the exchange.
    before_BDN = torch.stack(prefixes)[comm.rank]
    y_BLDM, _ = dense_scan(u_BLD, a_DNN, b_DN, c_DMN, state=before_BDN)
    return y_BLDM, prefixes[-1]
