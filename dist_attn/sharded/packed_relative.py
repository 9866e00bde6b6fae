"""Relative attention inside packed documents that are cut across ranks: sums and windows go where a document goes on.

A rank's first and last document may go on elsewhere; those between are the local operation's. Later ranks hear of the
last document's kernel state and window, earlier ranks of the first one's state and mirrored window.
"""

from dataclasses import dataclass

import torch

from dist_attn.layout import SequenceLayout
from dist_attn.ops.relative_attention import RelativeCall, RelativeState, WindowState, attend_relative
from dist_attn.ops.relative_attention.numerators import numerators, numerators_around
from dist_attn.ops.relative_attention.state import normalised
from dist_attn.sharded.document_exchange import Heard, hear_from
from dist_attn.sharded.sharding import Sharding

__all__ = ["sharded_packed_relative_attention"]


def sharded_packed_relative_attention(
    sharding: Sharding,
    phi_q_BHLK: torch.Tensor,
    phi_k_BHLK: torch.Tensor,
    v_BHLV: torch.Tensor,
    phi_rp_HRK: torch.Tensor,
    *,
    causal: bool,
) -> torch.Tensor:
    """`ops.relative_attention` with documents on this rank's slice; queries and keys lie on the same layout.

    Shapes: as `ops.relative_attention`, L local; may be 0.
    Cost: (M + r) (V + 1) elements per batch element and head, r = max(k, 1), to each later rank that holds a part of
        the last document here; when not causal, also to each earlier rank that holds one of the first. Backward the
        same the other way. No document over a cut: nothing.
    """
    comm, layout = sharding.comm, sharding.layout
    call = RelativeCall(phi_q_BHLK, phi_k_BHLK, v_BHLV, phi_rp_HRK, causal)
    call.check()
    (q, k, v1, rp_HRK), width = call.widened(), call.width
    rank, length, starts = comm.rank, v1.shape[2], layout.documents_on(comm.rank)
    head, tail = (starts[0], starts[-1]) if starts else (length, 0)
    goes_on = not causal and bool(starts) and bool(layout.ranks_after(rank))
    inner = tail if goes_on else length
    # A rank without a start has one piece, which is both its first and its last document.
    own_last = RelativeState.of(k[:, :, tail:], v1[:, :, tail:], width)
    mirrored_first = RelativeState.of(k[:, :, :head].flip(2), v1[:, :, :head].flip(2), width)
    sources = [(*layout.ranks_before(r), *(() if causal else layout.ranks_after(r))) for r in range(layout.size)]
    heard = hear_from(comm, sources, _packed(own_last), None if causal else _packed(mirrored_first), label="carry")
    parts = _Parts(layout, heard, own_last, width)
    before = parts.before(rank)
    first = q[:, :, :head], k[:, :, :head], v1[:, :, :head]
    outs = []
    if causal:
        num = numerators(*first, rp_HRK[:, : call.reach + 1], own=True, before=before)
    else:
        after = parts.after(rank) if not starts else parts.nothing
        sums = before.sz_BHMW + mirrored_first.sz_BHMW + after.sz_BHMW
        num = numerators_around(first[0], first[2], rp_HRK, sums, before.window, after.window)
    outs.append(normalised(num, v_BHLV.dtype))
    if starts:
        documents = tuple(start - head for start in starts if start < inner)
        mid_q, mid_k, mid_v = (t[:, :, head:inner] for t in (phi_q_BHLK, phi_k_BHLK, v_BHLV))
        outs.append(attend_relative(RelativeCall(mid_q, mid_k, mid_v, phi_rp_HRK, causal, documents=documents)))
    if goes_on:
        after = parts.after(rank)
        sums = own_last.sz_BHMW + after.sz_BHMW
        num = numerators_around(q[:, :, tail:], v1[:, :, tail:], rp_HRK, sums, parts.nothing.window, after.window)
        outs.append(normalised(num, v_BHLV.dtype))
    return torch.cat(outs, dim=2)


@dataclass(frozen=True)
class _Parts:
    """What was heard of other ranks' parts of this rank's first and last document."""

    layout: SequenceLayout
    heard: Heard
    like: RelativeState
    width: int

    @property
    def nothing(self) -> RelativeState:
        """The state of no tokens."""
        window = self.like.window
        empty = WindowState(torch.zeros_like(window.far_BHW), torch.zeros_like(window.near_BHTW), 0)
        return RelativeState(torch.zeros_like(self.like.sz_BHMW), empty)

    def before(self, rank: int) -> RelativeState:
        """What earlier ranks hold of the document of this rank's first token."""
        state = self.nothing
        for other in self.layout.ranks_before(rank):
            starts, length = self.layout.documents_on(other), self.layout.lengths[other]
            state = state.combine(self._of(other, length - (starts[-1] if starts else 0)))
        return RelativeState(self.heard.connect(state.sz_BHMW), state.window)

    def after(self, rank: int) -> RelativeState:
        """What later ranks hold of the document of this rank's last token, mirrored."""
        state = self.nothing
        for other in reversed(self.layout.ranks_after(rank)):
            starts, length = self.layout.documents_on(other), self.layout.lengths[other]
            state = state.combine(self._of(other, starts[0] if starts else length))
        return state

    def _of(self, rank: int, length: int) -> RelativeState:
        features = self.like.sz_BHMW.shape[2]
        sums, far, near = self.heard.messages[rank].split((features, 1, self.width), dim=2)
        return RelativeState(sums, WindowState(far[:, :, 0], near, length))


def _packed(state: RelativeState) -> torch.Tensor:
    """Rows [.., W] below each other: the kernel state, the sum of far values, the near ones."""
    return torch.cat([state.sz_BHMW, state.window.far_BHW[:, :, None], state.window.near_BHTW], dim=2)
