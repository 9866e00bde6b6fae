"""Linear recurrences over tokens cut across ranks: each rank leaves a state by itself, and a scan joins the states.

A rank's tokens take a state x to A x + (what they leave from 0), and states join by the monoids of `ops.monoid`. Where
all ranks know the diagonal or full matrix, a message holds the number of tokens in place of A; for a LegS memory it
holds the first column of A, found by one more channel that begins as e_0 and has no input.

Where tokens choose the decays, a rank's element is what its tokens leave from zeros and the sum of their log decays,
which a document that starts among them makes -inf; a second walk begins from the state before the rank's first token.

Of packed documents that are cut across ranks, states go where a document goes on.

Shape letters: B batch, L tokens here, D channels, N numbers of a channel's state, M outputs of a channel.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F

from dist_attn.ops.dense_space import DenseCall, absorb_dense_inputs, scan_dense
from dist_attn.ops.diagonal import DiagonalCall, absorb_inputs, power, scan_diagonal
from dist_attn.ops.legs import LegsCall, LegsState, absorb_signal, legs_memory
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
from dist_attn.sharded.document_exchange import hear_from, ranks_heard
from dist_attn.sharded.prefix_scan import LegsForgets, LogDecay, Powers, scan_over_ranks
from dist_attn.sharded.sharding import Sharding, over_ranks


@over_ranks(DiagonalCall)
def sharded_diagonal_scan(sharding: Sharding, call: DiagonalCall) -> tuple[torch.Tensor, torch.Tensor]:
    """`ops.diagonal_scan` on this rank's slice, whose documents are the layout's.

    The call's state is the one before the first global token, equal on all ranks; the state returned is the global
    final one, on every rank. Gradients of a, b, c and of the state are this rank's share.

    Shapes: as `ops.diagonal_scan`, L local, which may be 0.
    Cost: a scan of 8 B D N + 8 bytes (twice for float64); a second pass over the local inputs for the state they
        leave. One rank alone: nothing of both.
    """
    if sharding.packed:
        return _packed_diagonal_scan(sharding, call)
    if sharding.comm.size == 1:
        return scan_diagonal(call)
    real, kind = call.types
    own_BDN = absorb_inputs(call.u_BLD, call.a_DN, call.b_DN, like=real)
    before_BDN, after_BDN = _scan_powers(sharding, call.a_DN.to(kind), own_BDN, call.state)
    return scan_diagonal(replace(call, state=before_BDN))[0], after_BDN


@over_ranks(DenseCall)
def sharded_dense_scan(sharding: Sharding, call: DenseCall) -> tuple[torch.Tensor, torch.Tensor]:
    """`ops.dense_scan` on this rank's slice; states and gradients as in `sharded_diagonal_scan`.

    Shapes: as `ops.dense_scan`, L local, which may be 0.
    Cost: a scan of 4 B D N + 8 bytes (twice for float64); a second pass over the local inputs for the state they
        leave, and powers of A where two states join. One rank alone: nothing.
    """
    if sharding.comm.size == 1:
        return scan_dense(call)
    like = call.c_DMN.dtype if call.state is None else torch.promote_types(call.c_DMN.dtype, call.state.dtype)
    like = torch.promote_types(like, torch.float32)
    own_BDN = absorb_dense_inputs(call.u_BLD, call.a_DNN, call.b_DN, like=like)
    before_BDN, after_BDN = _scan_powers(sharding, call.a_DNN.to(own_BDN.dtype), own_BDN, call.state)
    return scan_dense(replace(call, state=before_BDN))[0], after_BDN


def _scan_powers(
    sharding: Sharding, a: torch.Tensor, own_BDN: torch.Tensor, state: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The states before this rank's first token and after the last global one; `own` is what its tokens leave."""
    layout, comm = sharding.layout, sharding.comm
    monoid = Powers(a, layout.total)
    own = monoid.counted(own_BDN.permute(1, 2, 0), layout.lengths[comm.rank])
    first = None if state is None else monoid.counted(state.to(own_BDN.dtype).permute(1, 2, 0), 0)
    before, after = scan_over_ranks(comm, monoid, own, first, sharding.exchange)
    return monoid.sums(before).permute(2, 0, 1), monoid.sums(after).permute(2, 0, 1)


@over_ranks(LegsCall)
def sharded_legs_memory(sharding: Sharding, call: LegsCall) -> tuple[torch.Tensor, LegsState]:
    """`ops.legs_memory` on this rank's slice; states and gradients as in `sharded_diagonal_scan`.

    Shapes: as `ops.legs_memory`, L local, which may be 0.
    Cost: a scan of 8 B (D + 1) N bytes; a second pass over the local tokens for what they leave, and B products with
        N x N matrices where two memories join. One rank alone: nothing of both.
    """
    f_BLD, read_DN, state = call.f_BLD, call.read_DN, call.state
    if sharding.comm.size == 1:
        return legs_memory(f_BLD, read_DN, state=state)
    layout = sharding.layout
    (batch, _, channels), size = f_BLD.shape, read_DN.shape[1]
    first = LegsState.empty(batch, channels, size, device=f_BLD.device) if state is None else state
    seen_B = first.seen_B + layout.range(sharding.comm.rank)[0]
    silent_BEN = F.pad(torch.zeros_like(first.c_BDN, dtype=torch.float64), (0, 0, 0, 1))
    silent_BEN[:, -1, 0] = 1.0
    own_BEN = absorb_signal(F.pad(f_BLD, (0, 1)), LegsState(silent_BEN, seen_B)).c_BDN
    own_BX = torch.cat([own_BEN[:, :-1].mT.flatten(1), (own_BEN - silent_BEN)[:, -1]], dim=1)
    first_BX = F.pad(first.c_BDN.double().mT.flatten(1), (0, size))
    scanned = scan_over_ranks(sharding.comm, LegsForgets(size), own_BX, first_BX, sharding.exchange)
    before_BDN, after_BDN = (x_BX[:, :-size].unflatten(1, (size, channels)).mT for x_BX in scanned)
    y_BLD, _ = legs_memory(f_BLD, read_DN, state=LegsState(before_BDN, seen_B))
    return y_BLD, LegsState(after_BDN, first.seen_B + layout.total)


def _packed_diagonal_scan(sharding: Sharding, call: DiagonalCall) -> tuple[torch.Tensor, torch.Tensor]:
    """`sharded_diagonal_scan` of every document by itself.

    If the state before the first global token is given, the global final state is returned on every rank; otherwise
    the state after this rank's last token, as in `sharded_packed_linear_attention`.

    Shapes: as `ops.diagonal_scan`, L local, which may be 0.
    Cost: per rank that hears from this one a message of 8 B D N bytes (16 for float64), backward the same the other
        way, and a second pass over the inputs of the last document here. No document over a cut and no state: nothing.
    """
    comm, layout, state = sharding.comm, sharding.layout, call.state
    sources = ranks_heard(layout, causal=True, final=state is not None)
    starts = layout.documents_on(comm.rank)
    call = replace(call, documents=starts)
    if not any(sources):
        return scan_diagonal(call)
    real, kind = call.types
    left_BDN = absorb_inputs(call.u_BLD[:, starts[-1] if starts else 0 :], call.a_DN, call.b_DN, like=real)
    heard = hear_from(comm, sources, torch.view_as_real(left_BDN), label="carry")

    def after(ranks: tuple[int, ...], begun: bool) -> torch.Tensor:
        """The state of one document after these ranks' tokens; `begun`: it starts in this sequence, so from zeros."""
        x_BDN = torch.zeros_like(left_BDN) if begun or state is None else state.to(kind)
        for rank in ranks:
            own = left_BDN if rank == comm.rank else torch.view_as_complex(heard.messages[rank])
            # Where the document starts on that rank x is 0, so its power counts for nothing.
            x_BDN = power(call.a_DN.to(kind), layout.lengths[rank]) * x_BDN + own
        return torch.view_as_complex(heard.connect(torch.view_as_real(x_BDN)))

    first, last = layout.document_of(layout.range(comm.rank)[0]), layout.document_of(layout.total - 1)
    y_BLD, here_BDN = scan_diagonal(replace(call, state=after(layout.ranks_before(comm.rank), first > 0)))
    return y_BLD, here_BDN if state is None else after(layout.ranks_of_last_document(), last > 0)


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
