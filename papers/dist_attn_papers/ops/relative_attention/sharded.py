"""Relative attention over a sequence that is cut across ranks: one all-gather of kernel states and windows of values.

What a rank needs of the ranks before it is their `RelativeState`: the sum of phi(k) [v, 1]^T, the values still in the
window, and the sum of the values that left it. Bidirectional attention needs the same of the ranks after it, on the
mirrored sequence. Every sum is sent as it is needed; none is the difference of two others.

Inside packed documents sums and windows go where a document goes on. A rank's first and last document may go on
elsewhere; those between are the local operation's. Later ranks hear of the last document's kernel state and window,
earlier ranks of the first one's state and mirrored window.

A memory that is cut otherwise than the queries first sends each rank the values, and when causal the keys, at the
positions of its queries. What lies behind the last query is only ever summed.

Shape letters: B batch, H heads, L queries and S keys here, K features, V values, W = V + 1 values beside a one, R
relative positions, T tokens of a window.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from dist_attn.comm import Communicator
from dist_attn.comm import differentiable as collectives
from dist_attn.errors import ConfigError
from dist_attn.layout import SequenceLayout
from dist_attn.ops.device import without_autocast
from dist_attn.sharded.document_exchange import Heard, hear_from, ranks_heard
from dist_attn.sharded.redistribution import realign_tokens
from dist_attn.sharded.sharding import Sharding, over_ranks
from dist_attn.sharded.trials import try_together
from dist_attn_papers.ops.relative_attention.call import (
    RelativeCall,
    RelativeStreamCall,
    attempt_relative,
    check_relative_choice,
)
from dist_attn_papers.ops.relative_attention.numerators import numerators, numerators_around
from dist_attn_papers.ops.relative_attention.state import RelativeState, WindowState, normalised
from dist_attn_papers.ops.relative_attention.trial import RelativeForm
from dist_attn_papers.ops.relative_attention.windowed import attend_relative, stream_relative


def try_relative(comm: Communicator, call: RelativeCall, form: RelativeForm | None = None) -> None:
    """`try_together` for relative attention, as a stream or of one sequence."""
    if call.implementation == "auto" and call.v_BHSV.device.type == "cuda":
        try_together(comm, [attempt_relative(call, form)])


@over_ranks(RelativeCall)
def sharded_relative_attention(sharding: Sharding, call: RelativeCall) -> torch.Tensor:
    """`ops.relative_attention` on this rank's slice; keys lie on the layout of the memory, which may be cut elsewhere.

    Over several ranks this operation has no kernels (`sharded_relative_attention_streaming` has).

    Shapes: as `ops.relative_attention`, L and S local; either may be 0.
    Raises: ConfigError over several ranks for an implementation other than "auto" or "streaming"; ShapeError when
        shapes do not fit together.
    Cost: one all-gather per rank of (M + r) (V + 1) elements per batch element and head when causal, r = max(k, 1),
        of (M + 2 r) (V + 1) when not, and r (V + 1) more where the memory is the longer one; its transpose backward.
        Independent of the length. On layouts that differ also one all-to-all of the values (when causal, and keys)
        that stand at positions of other ranks' queries.
    Reference: Scaleformer, Eq. 9 to 11.
    """
    comm, layout, memory, causal = sharding.comm, sharding.layout, sharding.memory, call.causal
    if sharding.packed:
        sharding.refuse_memory("relative_attention")
        return sharded_packed_relative_attention(sharding, call)
    if comm.size == 1:
        return attend_relative(call)
    if sharding.implementation not in ("auto", "streaming"):
        raise ConfigError("over several ranks relative attention has kernels ('triton') as a stream only; use 'auto'")
    call.check()
    dtype = torch.promote_types(call.v_BHSV.dtype, torch.float32)
    q, k, v, rp_HRK = (t.to(dtype) for t in call.tensors)
    aligned = realign_tokens(comm, memory, layout, torch.cat([k, v], dim=3) if causal else v, label="memory")
    k_BHLK, v_BHLV = aligned.split((k.shape[3], v.shape[3]), dim=3) if causal else (k, aligned)
    # Queries after the last key see zeros there, ones column included, which add nothing.
    missing = (0, 0, 0, q.shape[2] - v_BHLV.shape[2])
    v1_BHLW = F.pad(F.pad(v_BHLV, (0, 1), value=1.0), missing)
    if causal:
        k_BHLK = F.pad(k_BHLK, missing)
        before, _ = _scan_states(comm, layout, RelativeState.of(k_BHLK, v1_BHLW, call.width), None)
        num = numerators(q, k_BHLK, v1_BHLW, rp_HRK[:, : call.reach + 1], own=True, before=before)
    else:
        num = _bidirectional(sharding, q, k, F.pad(v, (0, 1), value=1.0), v1_BHLW, rp_HRK)
    return normalised(num, call.v_BHSV.dtype)


@over_ranks(RelativeStreamCall)
def sharded_relative_attention_streaming(
    sharding: Sharding, stream: RelativeStreamCall
) -> tuple[torch.Tensor, RelativeState]:
    """`ops.relative_attention_streaming` on this rank's slice.

    The call's state is the one before the first global token, equal on all ranks; the state returned is the global
    final one, on every rank. Gradients of replicated inputs are this rank's share.

    Cost: as causal `sharded_relative_attention` on one layout. One rank alone exchanges nothing.
    Raises: ShapeError when shapes do not fit together; ConfigError, on ranks without tokens too, for an implementation
        that cannot take this call.
    """
    call = stream.call
    if sharding.comm.size == 1:
        return stream_relative(call)
    call.check()
    check_relative_choice(call)
    try_relative(sharding.comm, call, "stream")
    wide = call.widened()
    own = RelativeState.of(wide.k_BHSK, wide.v1_BHSW, call.width)
    before, after = _scan_states(sharding.comm, sharding.layout, own, call.state)
    # Kernels take no empty slice, which must not be refused for that; everything else was checked on every rank.
    by = call.implementation if call.keys else "streaming"
    return stream_relative(replace(call, state=before, implementation=by))[0], after


def _scan_states(
    comm: Communicator, layout: SequenceLayout, own: RelativeState, initial: RelativeState | None
) -> tuple[RelativeState, RelativeState]:
    """The state before this rank's first token and the one after the last token of all ranks."""
    messages = collectives.all_gather(comm, own.pack(), label="carry").unbind(0)
    prefixes = [own.emptied() if initial is None else initial]
    for message, length in zip(messages, layout.lengths, strict=True):
        prefixes.append(prefixes[-1].combine(own.unpack(message, length)))
    # Stack, then pick, so that every rank's graph reaches the exchange.
    sums = torch.stack([prefix.sz_BHMW for prefix in prefixes])[comm.rank]
    return RelativeState(sums, _pick([prefix.window for prefix in prefixes], comm.rank)), prefixes[-1]


def _bidirectional(
    sharding: Sharding,
    q: torch.Tensor,
    k_BHSK: torch.Tensor,
    v1_BHSW: torch.Tensor,
    v1_BHLW: torch.Tensor,
    rp_HRK: torch.Tensor,
) -> torch.Tensor:
    """Numerators where every query sees every key: v1 [.., S, W] of the memory here, [.., L, W] at the queries."""
    comm, layout, memory = sharding.comm, sharding.layout, sharding.memory
    width = max(rp_HRK.shape[1] // 2 - 1, 0)
    with without_autocast(q.device):
        sums_BHMW = k_BHSK.transpose(-1, -2) @ v1_BHSW
    own = WindowState.of(v1_BHLW, width)
    sent = [sums_BHMW, own.pack(), WindowState.of(v1_BHLW.flip(2), width).pack()]
    behind = [max(0, stop - max(start, layout.total)) for start, stop in map(memory.range, range(memory.size))]
    if sum(behind):
        sent.append(WindowState.of(v1_BHSW[:, :, v1_BHSW.shape[2] - behind[comm.rank] :].flip(2), width).pack())
    # Everything in one message, rows [.., W] below each other.
    gathered = collectives.all_gather(comm, torch.cat(sent, dim=2), label="carry")
    sums, *windows = zip(*(message.split([rows.shape[2] for rows in sent], dim=2) for message in gathered), strict=True)
    start = own.emptied()
    prefixes = _prefixes(windows[0], layout.lengths, start)
    # In the mirrored sequence, what lies behind the last query comes first.
    if sum(behind):
        start = _prefixes(windows[2][::-1], behind[::-1], start)[-1]
    mirrored = _prefixes(windows[1][::-1], layout.lengths[::-1], start)
    before, after = _pick(prefixes, comm.rank), _pick(mirrored, layout.size - 1 - comm.rank)
    return numerators_around(q, v1_BHLW, rp_HRK, torch.stack(sums).sum(0), before, after)


def _prefixes(messages: Sequence[torch.Tensor], lengths: Sequence[int], start: WindowState) -> list[WindowState]:
    """`start`, and the windows after each rank's stretch behind it."""
    prefixes = [start]
    for rows, length in zip(messages, lengths, strict=True):
        prefixes.append(prefixes[-1].combine(WindowState.unpack(rows, length)))
    return prefixes


def _pick(windows: list[WindowState], index: int) -> WindowState:
    return WindowState(
        torch.stack([w.far_BHW for w in windows])[index],
        torch.stack([w.near_BHTW for w in windows])[index],
        windows[index].length,
    )


def sharded_packed_relative_attention(sharding: Sharding, call: RelativeCall) -> torch.Tensor:
    """`ops.relative_attention` with documents on this rank's slice; queries and keys lie on the same layout.

    Shapes: as `ops.relative_attention`, L local; may be 0.
    Cost: (M + r) (V + 1) elements per batch element and head, r = max(k, 1), to each later rank that holds a part of
        the last document here; when not causal, also to each earlier rank that holds one of the first. Backward the
        same the other way. No document over a cut: nothing.
    """
    comm, layout, causal = sharding.comm, sharding.layout, call.causal
    call.check()
    if comm.size > 1:
        try_relative(comm, replace(call, documents=()))
    (q, k, v1, rp_HRK), width, dtype = call.widened(), call.width, call.v_BHSV.dtype
    rank, length, starts = comm.rank, v1.shape[2], layout.documents_on(comm.rank)
    head, tail = (starts[0], starts[-1]) if starts else (length, 0)
    goes_on = not causal and bool(starts) and bool(layout.ranks_after(rank))
    inner = tail if goes_on else length
    # A rank without a start has one piece, which is both its first and its last document.
    own_last = RelativeState.of(k[:, :, tail:], v1[:, :, tail:], width)
    mirrored_first = RelativeState.of(k[:, :, :head].flip(2), v1[:, :, :head].flip(2), width)
    sources = ranks_heard(layout, causal=causal, final=False)
    heard = hear_from(comm, sources, own_last.pack(), None if causal else mirrored_first.pack(), label="carry")
    parts, nothing = _Parts(layout, heard, own_last), own_last.emptied()
    before = parts.before(rank)
    first = q[:, :, :head], k[:, :, :head], v1[:, :, :head]
    outs = []
    if causal:
        num = numerators(*first, rp_HRK[:, : call.reach + 1], own=True, before=before)
    else:
        after = parts.after(rank) if not starts else nothing
        sums = before.sz_BHMW + mirrored_first.sz_BHMW + after.sz_BHMW
        num = numerators_around(first[0], first[2], rp_HRK, sums, before.window, after.window)
    outs.append(normalised(num, dtype))
    if starts:
        documents = tuple(start - head for start in starts if start < inner)
        middle = call.with_qkv(*(t[:, :, head:inner] for t in call.tensors[:3]))
        outs.append(attend_relative(replace(middle, documents=documents)))
    if goes_on:
        after = parts.after(rank)
        sums = own_last.sz_BHMW + after.sz_BHMW
        num = numerators_around(q[:, :, tail:], v1[:, :, tail:], rp_HRK, sums, nothing.window, after.window)
        outs.append(normalised(num, dtype))
    return torch.cat(outs, dim=2)


@dataclass(frozen=True)
class _Parts:
    """The states of other ranks' parts of this rank's first and last document, as they were heard."""

    layout: SequenceLayout
    heard: Heard
    like: RelativeState

    def before(self, rank: int) -> RelativeState:
        """The state that earlier ranks hold of the document of this rank's first token."""
        state = self.like.emptied()
        for other in self.layout.ranks_before(rank):
            state = state.combine(self._of(other, self.layout.at_ends(other)[1]))
        return RelativeState(self.heard.connect(state.sz_BHMW), state.window)

    def after(self, rank: int) -> RelativeState:
        """The state that later ranks hold of the document of this rank's last token, mirrored."""
        state = self.like.emptied()
        for other in reversed(self.layout.ranks_after(rank)):
            state = state.combine(self._of(other, self.layout.at_ends(other)[0]))
        return state

    def _of(self, rank: int, length: int) -> RelativeState:
        return self.like.unpack(self.heard.messages[rank], length)
