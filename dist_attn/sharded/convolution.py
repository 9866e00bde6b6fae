"""Short convolutions across ranks: tokens just outside a slice, of its first and last document, come to it.

Shape letters: B batch, L tokens here, D channels, K taps.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F

from dist_attn.comm import Communicator, Pending
from dist_attn.comm import differentiable as collectives
from dist_attn.layout import SequenceLayout
from dist_attn.ops.convolution import (
    ConvolutionCall,
    ConvolutionStreamCall,
    check_taps,
    convolve,
    convolve_numbered,
    convolve_padded,
    convolve_streaming,
    tail_of,
)
from dist_attn.ops.documents import document_numbers
from dist_attn.sharded.document_exchange import Heard, hear_from, ranks_heard
from dist_attn.sharded.sharding import Sharding, over_ranks


@over_ranks(ConvolutionStreamCall)
def sharded_convolve_streaming(sharding: Sharding, call: ConvolutionStreamCall) -> tuple[torch.Tensor, torch.Tensor]:
    """`ops.convolve_streaming` on this rank's slice; tails are those before the first and after the last global token.

    Of packed documents without a tail given, the tail returned is the one after this rank's last token.

    Cost: one all-gather of (K - 1) B D elements per rank; none for K = 1. Without gradients on CPUs as many go to the
        next rank, and those of the last one to all.
    """
    x_BLD, w_KD, tail_BKD = call.x_BLD, call.w_KD, call.tail_BKD
    check_taps(x_BLD, w_KD)
    comm, layout = sharding.comm, sharding.layout
    if sharding.packed:
        return _packed_convolve_streaming(comm, layout, x_BLD, w_KD, tail_BKD)
    keep = w_KD.shape[0] - 1
    contexts = _contexts_in_line if keep and comm.size > 1 and sharding.one_way(x_BLD) else _left_contexts
    before, after = contexts(sharding, x_BLD, tail_of(x_BLD, keep, tail_BKD))
    return convolve_padded(torch.cat([before, x_BLD], dim=1), w_KD), after


@over_ranks(ConvolutionCall)
def sharded_convolve(sharding: Sharding, call: ConvolutionCall) -> torch.Tensor:
    """`ops.convolve` on this rank's slice.

    Cost: one all-gather of (K - 1) B D elements per rank, two with the same sum when centred; none for K = 1.
    """
    x_BLD, w_KD, centred = call.x_BLD, call.w_KD, call.centred
    check_taps(x_BLD, w_KD)
    comm, layout = sharding.comm, sharding.layout
    if sharding.packed:
        return _packed_convolve(comm, layout, x_BLD, w_KD, centred)
    ahead = w_KD.shape[0] // 2 if centred else 0
    behind = w_KD.shape[0] - 1 - ahead
    zeros = x_BLD.new_zeros((x_BLD.shape[0], behind + ahead, x_BLD.shape[2]))
    before, _ = _left_contexts(sharding, x_BLD, zeros[:, :behind])
    # The tokens after a slice are those before it in the mirrored sequence of mirrored ranks.
    after = _right_context(comm, layout, x_BLD, zeros[:, :ahead])
    return convolve_padded(torch.cat([before, x_BLD, after], dim=1), w_KD)


def _contexts_in_line(
    sharding: Sharding, x_BLD: torch.Tensor, tail_BKD: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`_left_contexts` without a wait for ranks behind this one: the end of the sequence is filled in when it is there.

    A rank hears from those that hold any of the K - 1 tokens before its slice, mostly the one before it.
    """
    comm, lengths, keep = sharding.comm, sharding.layout.lengths, tail_BKD.shape[1]
    ranks, here, edge_BKD = range(comm.size), comm.rank, _last(x_BLD, keep)
    holders, at_end = [_holders(lengths[:rank], keep) for rank in ranks], _holders(lengths, keep)

    def start(to: Sequence[int], of: Sequence[int]) -> Pending:
        edges = edge_BKD.expand(len(to), *edge_BKD.shape).contiguous()
        return comm.send_receive_start(edges, dict.fromkeys(to, 1), dict.fromkeys(of, 1), label="halo")

    def context(of: Sequence[int], edges: Mapping[int, torch.Tensor]) -> torch.Tensor:
        joined_BKD = tail_BKD
        for rank in of:
            joined_BKD = _with_edge(joined_BKD, edges[rank], lengths[rank])
        return joined_BKD

    # Each edge goes to a rank once at most, even where slices are shorter than it.
    late = [rank for rank in at_end if rank != here and rank not in holders[here]]
    to_late = [rank for rank in ranks if here in at_end and rank != here and here not in holders[rank]]
    exchange = start([rank for rank in ranks if here in holders[rank]], holders[here])
    rest = start(to_late, late)
    edges = {here: edge_BKD, **dict(zip(holders[here], exchange.arrived(), strict=True))}
    after_BKD = torch.full_like(tail_BKD, torch.nan)

    def fill() -> None:
        exchange.wait()
        after_BKD.copy_(context(at_end, edges | dict(zip(late, rest.wait(), strict=True))))

    sharding.when_there(fill)
    return context(holders[here], edges), after_BKD


def _holders(lengths: Sequence[int], keep: int) -> list[int]:
    """The ranks of these that hold any of the last `keep` tokens, in order."""
    found = []
    for rank in reversed(range(len(lengths))):
        if keep > 0 and lengths[rank]:
            found.append(rank)
            keep -= lengths[rank]
    return found[::-1]


def _left_contexts(
    sharding: Sharding, x_BLD: torch.Tensor, tail_BKD: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The last K - 1 tokens before this rank's slice, and those at the end of the sequence."""
    comm, layout, keep = sharding.comm, sharding.layout, tail_BKD.shape[1]
    if not keep:
        return tail_BKD, tail_BKD
    edges_P = collectives.all_gather(comm, _last(x_BLD, keep), label="halo").unbind(0)
    contexts = [tail_BKD]
    for edge_BKD, length in zip(edges_P, layout.lengths, strict=True):
        contexts.append(_with_edge(contexts[-1], edge_BKD, length))
    # The last context is a tensor of its own, which a state may hold on to without the others; every rank's graph
    # reaches the exchange through it. Stack, then pick: rank 0's own context alone would not.
    return torch.stack(contexts)[comm.rank], contexts[-1]


def _right_context(
    comm: Communicator, layout: SequenceLayout, x_BLD: torch.Tensor, zeros_BKD: torch.Tensor
) -> torch.Tensor:
    """The first tokens after this rank's slice; zeros behind the end of the sequence."""
    keep = zeros_BKD.shape[1]
    if not keep:
        return zeros_BKD
    edges_P = collectives.all_gather(comm, _first(x_BLD, keep), label="halo").unbind(0)
    contexts = [zeros_BKD]
    for edge_BKD, length in zip(reversed(edges_P), reversed(layout.lengths), strict=True):
        known = min(length, keep)
        contexts.append(torch.cat([edge_BKD[:, :known], contexts[-1][:, : keep - known]], dim=1))
    return torch.stack(contexts)[layout.size - 1 - comm.rank]


def _packed_convolve(
    comm: Communicator, layout: SequenceLayout, x_BLD: torch.Tensor, w_KD: torch.Tensor, centred: bool
) -> torch.Tensor:
    """`sharded_convolve` of every document by itself.

    Cost: (K - 1) B D elements to each rank that holds a part of the last document here, and when centred of the first.
        Nothing where no document crosses a cut.
    """
    keep = w_KD.shape[0] - 1
    if not keep:
        return convolve(x_BLD, w_KD)
    ahead = w_KD.shape[0] // 2 if centred else 0
    sources = ranks_heard(layout, causal=not ahead, final=False)
    heard = hear_from(comm, sources, _last(x_BLD, keep), _first(x_BLD, keep), label="halo")
    zeros = x_BLD.new_zeros((x_BLD.shape[0], keep, x_BLD.shape[2]))
    before = _before(layout, comm.rank, heard, zeros)
    after = zeros
    for rank in reversed(layout.ranks_after(comm.rank) if ahead else ()):
        known = min(layout.at_ends(rank)[0], keep)
        after = torch.cat([heard.messages[rank][:, :known], after[:, : keep - known]], dim=1)
    behind = keep - ahead
    padded = torch.cat([before[:, keep - behind :], x_BLD, after[:, :ahead]], dim=1)
    return convolve_numbered(heard.connect(padded), w_KD, _numbers(layout, comm.rank, behind, ahead, x_BLD), behind)


def _packed_convolve_streaming(
    comm: Communicator,
    layout: SequenceLayout,
    x_BLD: torch.Tensor,
    w_KD: torch.Tensor,
    tail_BKD: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`sharded_convolve_streaming` of every document by itself.

    If the tail before the first global token is given, that after the last one is returned on every rank; otherwise
    the tail after this rank's last token.

    Cost: (K - 1) B D elements to each rank that holds a later part of the last document here; with a tail, from the
        ranks of the last document to all.
    """
    keep = w_KD.shape[0] - 1
    if not keep:
        return convolve_streaming(x_BLD, w_KD, tail_BKD)
    sources = ranks_heard(layout, causal=True, final=tail_BKD is not None)
    heard = hear_from(comm, sources, _last(x_BLD, keep), label="halo")
    zeros = x_BLD.new_zeros((x_BLD.shape[0], keep, x_BLD.shape[2]))
    given = tail_of(x_BLD, keep, tail_BKD)
    start, _ = layout.range(comm.rank)
    before = _before(layout, comm.rank, heard, given if layout.document_of(start) == 0 else zeros)
    y_BLD = convolve_numbered(
        heard.connect(torch.cat([before, x_BLD], dim=1)), w_KD, _numbers(layout, comm.rank, keep, 0, x_BLD), keep
    )
    if tail_BKD is None:
        starts = bool(layout.documents_on(comm.rank))
        return y_BLD, _joined(layout, comm.rank, zeros if starts else before, _last(x_BLD, keep))
    after = given if layout.document_of(layout.total - 1) == 0 else zeros
    for rank in layout.ranks_of_last_document():
        edge = _last(x_BLD, keep) if rank == comm.rank else heard.messages[rank]
        after = _joined(layout, rank, after, edge)
    return y_BLD, heard.connect(after)


def _before(layout: SequenceLayout, rank: int, heard: Heard, start_BKD: torch.Tensor) -> torch.Tensor:
    """The last K - 1 tokens before this rank's slice, of the document of its first token."""
    context = start_BKD
    for other in layout.ranks_before(rank):
        context = _joined(layout, other, context, heard.messages[other])
    return context


def _joined(layout: SequenceLayout, rank: int, context_BKD: torch.Tensor, edge_BKD: torch.Tensor) -> torch.Tensor:
    """The context after the last document's tokens on `rank`, of which the edge holds the last ones."""
    return _with_edge(context_BKD, edge_BKD, layout.at_ends(rank)[1])


def _with_edge(context_BKD: torch.Tensor, edge_BKD: torch.Tensor, length: int) -> torch.Tensor:
    """The context behind a slice of `length` tokens, of which the edge holds the last ones."""
    keep = context_BKD.shape[1]
    known = min(length, keep)
    # A slice shorter than the halo leaves older tokens in it, so a halo may span several ranks.
    return torch.cat([context_BKD[:, known:], edge_BKD[:, keep - known :]], dim=1)


def _last(x_BLD: torch.Tensor, keep: int) -> torch.Tensor:
    known = min(x_BLD.shape[1], keep)
    return F.pad(x_BLD[:, x_BLD.shape[1] - known :], (0, 0, keep - known, 0))


def _first(x_BLD: torch.Tensor, keep: int) -> torch.Tensor:
    known = min(x_BLD.shape[1], keep)
    return F.pad(x_BLD[:, :known], (0, 0, 0, keep - known))


def _numbers(layout: SequenceLayout, rank: int, behind: int, ahead: int, x_BLD: torch.Tensor) -> torch.Tensor:
    """The document of each row, those outside counted to the first and the last one of the slice."""
    starts = layout.documents_on(rank)
    number_L = document_numbers(starts, x_BLD.shape[1], x_BLD.device)
    return F.pad(F.pad(number_L, (behind, 0)), (0, ahead), value=len(starts))
