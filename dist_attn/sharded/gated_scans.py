"""Gated recurrences over tokens cut across ranks: each rank leaves a state by itself, and a scan joins the states.

Tokens choose the decays, so a rank's element is what its tokens leave from zeros and the sum of their log decays, which
a document that starts among them makes -inf; a second walk begins from the state before the rank's first token.

Of packed documents that are cut across ranks, states go where a document goes on.

Shape letters: B batch, L tokens here, D channels, N numbers of a channel's state.
"""

from dataclasses import replace

import torch

from dist_attn.ops.selective_scan import (
    GatedCall,
    SelectiveCall,
    absorb_gated,
    absorb_selected,
    scan_gated,
    scan_selected,
    sums_dtype,
)
from dist_attn.sharded.carry_scan import widened_for_grad_accumulation
from dist_attn.sharded.prefix_scan import LogDecay, scan_over_ranks
from dist_attn.sharded.sharding import Sharding, over_ranks


@over_ranks(GatedCall)
def sharded_gated_scan(sharding: Sharding, call: GatedCall) -> tuple[torch.Tensor, torch.Tensor]:
    """`ops.gated_scan` on this rank's slice.

    `state` is the one before the first global token, equal on all ranks; the state returned is the global final one,
    on every rank. Only where no state is given and no document lies on several ranks, each rank returns the state of
    its own last document. Gradients of the state are this rank's share.

    Shapes: as `ops.gated_scan`, L local, which may be 0.
    Cost: a scan of 8 B D bytes (twice for float64); a second pass over the local tokens for the state they leave. One
        rank alone, or no state given and no document over a cut: nothing of both.
    """
    documents = sharding.layout.documents_on(sharding.comm.rank)
    call = replace(call, documents=documents)
    state = call.state
    if _alone(sharding, state):
        return scan_gated(call)
    dtype = sums_dtype(call.x_BLD, call.log_decay_BLD, state)
    x, decay = (widened_for_grad_accumulation(t, dtype) for t in (call.x_BLD, call.log_decay_BLD))
    last = documents[-1] if documents else 0
    own_BD = absorb_gated(x[:, last:], decay[:, last:], like=dtype)
    log_decay_BD = _forgotten(documents, decay.to(dtype).sum(1))
    before_BD1, after_BD1 = _scan(
        sharding, own_BD[..., None], log_decay_BD[..., None], None if state is None else state[..., None]
    )
    h_BLD, _ = scan_gated(replace(call, x_BLD=x, log_decay_BLD=decay, state=before_BD1[..., 0]))
    return h_BLD.to(call.x_BLD.dtype), after_BD1[..., 0]


@over_ranks(SelectiveCall)
def sharded_selective_scan(sharding: Sharding, call: SelectiveCall) -> tuple[torch.Tensor, torch.Tensor]:
    """`ops.selective_scan` on this rank's slice; states as in `sharded_gated_scan`.

    Gradients of a, skip and the state are this rank's share.

    Shapes: as `ops.selective_scan`, L local, which may be 0.
    Cost: a scan of 8 B D N bytes (twice for float64); a second pass over the local tokens for the state they leave. One
        rank alone, or no state given and no document over a cut: nothing of both.
    """
    documents = sharding.layout.documents_on(sharding.comm.rank)
    call = replace(call, documents=documents)
    if _alone(sharding, call.state):
        return scan_selected(call)
    a_DN, dtype = call.a_DN, call.dtype
    x, dt, b = (widened_for_grad_accumulation(t, dtype) for t in (call.x_BLD, call.dt_BLD, call.b_BLN))
    last = documents[-1] if documents else 0
    own_BDN = absorb_selected(x[:, last:], dt[:, last:], a_DN, b[:, last:], like=dtype)
    log_decay_BDN = _forgotten(documents, dt.to(dtype).sum(1)[..., None] * a_DN)
    before_BDN, after_BDN = _scan(sharding, own_BDN, log_decay_BDN, call.state)
    y_BLD, _ = scan_selected(replace(call, x_BLD=x, dt_BLD=dt, b_BLN=b, state=before_BDN))
    return y_BLD.to(call.x_BLD.dtype), after_BDN


def _alone(sharding: Sharding, state: torch.Tensor | None) -> bool:
    """Return whether no rank needs the state of another; the same answer on all ranks."""
    layout = sharding.layout
    return layout.size == 1 or (bool(layout.documents) and state is None and not layout.crosses_cuts)


def _forgotten(documents: tuple[int, ...], log_decay: torch.Tensor) -> torch.Tensor:
    """The log decay of a slice in which these documents start."""
    return torch.full_like(log_decay, -torch.inf) if documents else log_decay


def _scan(
    sharding: Sharding, own_BDN: torch.Tensor, log_decay_BDN: torch.Tensor, state: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The states before this rank's first token and after the last global one."""
    size = own_BDN.shape[-1]
    own_BDX = torch.cat([own_BDN, log_decay_BDN], dim=-1)
    first_BDX = None
    if state is not None:
        first_BDX = torch.cat([state.to(own_BDN.dtype), torch.zeros_like(log_decay_BDN)], dim=-1)
    before_BDX, after_BDX = scan_over_ranks(sharding.comm, LogDecay(size), own_BDX, first_BDX, sharding.exchange)
    return before_BDX[..., :size], after_BDX[..., :size]
