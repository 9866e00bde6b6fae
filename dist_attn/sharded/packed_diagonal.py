"""The diagonal recurrence inside packed documents that are cut across ranks: states go where a document goes on."""

import torch

from dist_attn.comm import Communicator
from dist_attn.layout import SequenceLayout
from dist_attn.ops.diagonal import absorb_inputs, packed_diagonal_scan, power, state_types
from dist_attn.sharded.document_exchange import hear_from
from dist_attn.sharded.packed_linear import ranks_heard

__all__ = ["sharded_packed_diagonal_scan"]


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

    Who gives a `state`, the one before the first global token, gets the global final one on every rank. Without, the
    state returned is the one after this rank's last token, as in `sharded_packed_linear_attention`.

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
