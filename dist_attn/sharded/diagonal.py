"""The diagonal state-space recurrence across ranks: one all-gather of states, folded with each rank's own decay.

A rank's tokens take a state x to a^n x + (what they leave by themselves), n being their number. All ranks know a and
every n, so only what is left by itself travels, and its size does not depend on the length.

Of packed documents that are cut across ranks, states go where a document goes on.
"""

import torch

from dist_attn.comm import Communicator
from dist_attn.comm import differentiable as collectives
from dist_attn.layout import SequenceLayout
from dist_attn.ops import diagonal_scan
from dist_attn.ops.diagonal import absorb_inputs, packed_diagonal_scan, power, state_types
from dist_attn.sharded.document_exchange import hear_from
from dist_attn.sharded.packed_linear import ranks_heard


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


def sharded_packed_diagonal_scan(
    comm: Communicator,
    layout: SequenceLayout,
    u_BLD: torch.Tensor,
    a_DN: torch.Tensor,
    b_DN: torch.Tensor,
    c_DN: torch.Tensor,
    *,
    state: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`ops.diagonal_scan` of every document by itself on this rank's slice.

    `state` is the one before the first global token. If it is given, the global final state is returned on every rank;
    otherwise the state after this rank's last token, as in `sharded_packed_linear_attention`.

    Shapes: as `ops.diagonal_scan`, L local, which may be 0.
    Cost: per rank that hears from this one a message of 8 B D N bytes (16 for float64), backward the same the other
        way, and a second pass over the inputs of the last document here. No document over a cut and no state: nothing.
    """
    sources = ranks_heard(layout, causal=True, final=state is not None)
    starts = layout.documents_on(comm.rank)
    if not any(sources):
        return packed_diagonal_scan(u_BLD, a_DN, b_DN, c_DN, documents=starts, state=state)
    real, kind = state_types(u_BLD, a_DN, b_DN, c_DN, state)
    left_BDN = absorb_inputs(u_BLD[:, starts[-1] if starts else 0 :], a_DN, b_DN, like=real)
    heard = hear_from(comm, sources, torch.view_as_real(left_BDN), label="carry")

    def after(ranks: tuple[int, ...], begun: bool) -> torch.Tensor:
        """The state of one document after these ranks' tokens; `begun` before the first global token or here at 0."""
        x_BDN = torch.zeros_like(left_BDN) if begun or state is None else state.to(kind)
        for rank in ranks:
            own = left_BDN if rank == comm.rank else torch.view_as_complex(heard.messages[rank])
            # Where the document starts on that rank x is 0, so its power counts for nothing.
            x_BDN = power(a_DN.to(kind), layout.lengths[rank]) * x_BDN + own
        return torch.view_as_complex(heard.connect(torch.view_as_real(x_BDN)))

    first, last = layout.document_of(layout.range(comm.rank)[0]), layout.document_of(layout.total - 1)
    y_BLD, here_BDN = packed_diagonal_scan(
        u_BLD, a_DN, b_DN, c_DN, documents=starts, state=after(layout.ranks_before(comm.rank), first > 0)
    )
    return y_BLD, here_BDN if state is None else after(layout.ranks_of_last_document(), last > 0)
