"""Exact softmax attention over layouts: which of its forms a call takes, first tokens that see each other fully.

Of packed documents those that lie whole on a rank are the local operation's. The tokens of documents that lie on
several ranks are a sequence with a layout of its own, which attends as any other.

The keys of a stream of blocks stay spread or become whole. Spread: every rank keeps the keys of its own slices. The
queries of a block go to all ranks, each attends with all of them to the keys that it keeps, and the partial results are
merged where the queries came from. What travels depends on the block alone, never on how much has been read, and the
work is even, since every block was cut over all ranks. Whole: the keys of a block go to all ranks, so that any of them
can go on alone, as decoding does.

Shape letters: B batch, H heads of queries, G of keys, L queries (of a stream, tokens of the block) and S keys here, T
tokens of the block on all ranks, K key size, V value size, P ranks, N numbers at each token.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate

import torch

from dist_attn.comm import Communicator
from dist_attn.errors import InputError
from dist_attn.layout import SequenceLayout
from dist_attn.ops.linear_attention import check_prefix
from dist_attn.ops.softmax_attention import (
    KeyValueCache,
    QueryPlacement,
    SoftmaxCall,
    SoftmaxStreamCall,
    attend_documents,
    attend_exactly,
    attend_onward,
    attend_partially,
    merge_partials,
)
from dist_attn.ops.softmax_attention.cache import streaming_placement
from dist_attn.ops.softmax_attention.tiled import with_sinks
from dist_attn.sharded.block_table import BlockTable, TableBlock
from dist_attn.sharded.document_exchange import starts_inside
from dist_attn.sharded.head_reshuffle import sharded_softmax_attention
from dist_attn.sharded.redistribution import redistribute
from dist_attn.sharded.redistribution_plan import Change, plan_redistribution
from dist_attn.sharded.ring_attention import ring_attention
from dist_attn.sharded.sharding import Sharding, over_ranks

Attention = Callable[[Sharding, SoftmaxCall], torch.Tensor]
"""Exact attention over layouts, however keys and queries meet."""


@over_ranks(SoftmaxCall)
def softmax_over_layouts(sharding: Sharding, call: SoftmaxCall) -> torch.Tensor:
    """`ops.softmax_attention` on this rank's slice, with documents where the layouts have some."""
    check_prefix(call.prefix, causal=call.causal, documents=sharding.packed)
    if call.options.relative is not None and sharding.packed:
        sharding.refuse_memory("softmax_attention with relative positions")
    attend = ring_attention if sharding.softmax == "ring" else sharded_softmax_attention
    if call.prefix:
        return _with_prefix(attend, sharding, call)
    if sharding.packed and sharding.memory == sharding.layout:
        return _packed(attend, sharding, call)
    return attend(sharding, call)


@over_ranks(SoftmaxStreamCall)
def softmax_stream_over_layouts(sharding: Sharding, stream: SoftmaxStreamCall) -> tuple[torch.Tensor, KeyValueCache]:
    """`ops.softmax_attention_streaming` on this rank's slice of a block, and what the cache then holds here.

    The first block goes the way that `sharding.softmax` says.
    """
    layout, rank, call, cache = sharding.layout, sharding.comm.rank, stream.call, stream.cache
    if sharding.comm.size == 1:
        return attend_onward(call, cache, layout.documents or ())
    if sharding.cache == "whole":
        return attend_over_whole_cache(sharding, call, cache)
    if cache.tokens:
        return attend_over_spread_cache(sharding, call, cache)
    out_BHLV = softmax_over_layouts(sharding, call)
    after = last_document(cache.appended(*call.qkv[1:], (layout.lengths,)), layout, rank)
    return out_BHLV, after.within(call.options.window, rank)


def _with_prefix(attend: Attention, sharding: Sharding, call: SoftmaxCall) -> torch.Tensor:
    """`ops.softmax_attention` with a prefix of global tokens, on this rank's slice.

    Cost: that of causal attention over all tokens and of full attention over the prefix; the causal rows of the prefix
        are computed and dropped.
    """
    queries, keys = (
        SequenceLayout(tuple(min(cut, call.prefix) for cut in part.cuts)) for part in (sharding.layout, sharding.memory)
    )
    here, there = queries.lengths[sharding.comm.rank], keys.lengths[sharding.comm.rank]
    rest_call = replace(call, prefix=0)
    first_qkv = (t[:, :, :count] for t, count in zip(call.qkv, (here, there, there), strict=True))
    first_call = replace(rest_call.with_qkv(*first_qkv), causal=False)
    first = attend(replace(sharding, layout=queries, memory=keys), first_call)
    rest = attend(sharding, rest_call)
    return torch.cat([first, rest[:, :, here:]], dim=2)


def _packed(attend: Attention, sharding: Sharding, call: SoftmaxCall) -> torch.Tensor:
    """`ops.softmax_attention` with documents on this rank's slice; queries and keys lie on the same layout.

    Cost: that of `attend` for the tokens of documents that lie on several ranks; nothing where there are none.
    """
    layout, rank = sharding.layout, sharding.comm.rank
    if not layout.crosses_cuts:
        return attend_documents(call, layout.documents_on(rank))
    parts = layout.pieces(rank)
    split = [t.split(parts, dim=2) for t in call.qkv]
    across = replace(sharding, layout=layout.across_cuts, memory=layout.across_cuts)
    across_BHLV = attend(across, call.with_qkv(*(torch.cat([first, last], dim=2) for first, _, last in split)))
    inside = call.with_qkv(*(inside for _, inside, _ in split))
    inside_BHLV = attend_documents(inside, starts_inside(layout, rank))
    first, last = across_BHLV.split((parts[0], parts[2]), dim=2)
    return torch.cat([first, inside_BHLV, last], dim=2)


def attend_over_spread_cache(
    sharding: Sharding, call: SoftmaxCall, cache: KeyValueCache
) -> tuple[torch.Tensor, KeyValueCache]:
    """`ops.softmax_attention_streaming` on this rank's slice of a block, over a cache with tokens in it.

    Cost: per rank P - 1 messages of B H L K elements and P - 1 of B H (V + 1) times the slice of the receiver,
        whatever the length of the cache. Memory: the share of the cache and a copy while it grows; queries and
        partial results of the whole block.
    Raises: InputError for a cache that is whole, or spread over another number of ranks.
    """
    comm, layout = sharding.comm, sharding.layout
    if cache.blocks is None:
        raise InputError(
            "a state that holds all keys was given to ranks that keep a share each; make these operations with "
            "cache='whole', or begin with an empty state"
        )
    if any(len(lengths) != comm.size for lengths in cache.blocks):
        raise InputError(
            f"a state that is spread over {len(cache.blocks[0])} ranks was given to {comm.size}; go on over the same "
            "ranks"
        )
    (batch, heads, length, values), total = call.output_shape, layout.total
    after = cache.appended(*call.qkv[1:], (*cache.blocks, layout.lengths))
    block = streaming_placement(cache.tokens, total, layout.documents or (), cache.dropped)
    placement = _of_own_keys(block, cache.dropped, _positions(after, comm.rank))
    q_BHTK = _to_every_rank(comm, layout, call.q_BHLK, "queries")
    of_all = replace(call.over(after.k_BGSK, after.v_BGSV, placement), q_BHLK=q_BHTK)
    of_all.check()
    out_BHTV, lse_BHT = attend_partially(of_all)
    part_TBHN = torch.cat([out_BHTV, lse_BHT[..., None]], dim=3).permute(2, 0, 1, 3)
    part_TN = part_TBHN.reshape(total, batch * heads * (values + 1))
    mine_PLN = _to_the_owners(comm, layout, part_TN).view(comm.size, length, batch, heads, values + 1)
    out_PBHLN = mine_PLN.permute(0, 2, 3, 1, 4)
    merged = merge_partials(out_PBHLN[..., :values].unbind(), out_PBHLN[..., values].unbind())
    out_BHLV = with_sinks(merged, call.options.sinks_H).to(call.v_BGSV.dtype)
    return out_BHLV, last_document(after, layout, comm.rank).within(call.options.window, comm.rank)


def attend_over_whole_cache(
    sharding: Sharding, call: SoftmaxCall, cache: KeyValueCache
) -> tuple[torch.Tensor, KeyValueCache]:
    """`ops.softmax_attention_streaming` on this rank's slice of a block; all ranks then hold all keys.

    Cost: per rank P - 1 messages of B G L (K + V) elements. Memory: the whole cache on every rank.
    Raises: InputError for a cache that is spread over ranks.
    """
    comm, layout = sharding.comm, sharding.layout
    cache.require_whole()
    kv_BGTN = _to_every_rank(comm, layout, torch.cat(call.qkv[1:], dim=3), "keys")
    after = cache.appended(*kv_BGTN.split([x.shape[3] for x in call.qkv[1:]], dim=3))
    block = streaming_placement(cache.tokens, layout.total, layout.documents or (), cache.dropped)
    documents_T, own = block.query_documents_L, slice(*layout.range(comm.rank))
    placement = QueryPlacement(
        block.queries_L[own],
        block.keys_S,
        None if documents_T is None else documents_T[own],
        block.key_documents_S,
    )
    out_BHLV = attend_exactly(call.over(after.k_BGSK, after.v_BGSV, placement))
    return out_BHLV, last_document(after, layout, comm.rank).within(call.options.window)


def last_document(cache: KeyValueCache, layout: SequenceLayout, rank: int) -> KeyValueCache:
    """The part of a cache ending with this block that later blocks still see: its last document, which goes on."""
    if not layout.documents:
        return cache
    return cache.since(cache.tokens - layout.total + layout.documents[-1], rank)


def _of_own_keys(placement: QueryPlacement, first: int, positions_S: torch.Tensor) -> QueryPlacement:
    """Place the same queries over the keys at some positions only; `placement` has all keys since `first`."""
    documents = placement.key_documents_S
    own = None if documents is None else documents[positions_S - first]
    return QueryPlacement(placement.queries_L, positions_S, placement.query_documents_L, own)


def _to_every_rank(comm: Communicator, layout: SequenceLayout, x_BHLN: torch.Tensor, label: str) -> torch.Tensor:
    """All slices of a block, on every rank: [B, H, L local, N] -> [B, H, T, N]."""
    batch, heads, length, size = x_BHLN.shape
    source = BlockTable.grid([layout.cuts], range(comm.size), comm.size)
    copies = tuple(TableBlock(rank, ((0, layout.total),)) for rank in range(comm.size))
    change = Change(source, BlockTable((layout.total,), comm.size, copies), batch * heads * size)
    plan = plan_redistribution((change,), relabel=False)
    (x_TN,) = redistribute(comm, plan, x_BHLN.permute(2, 0, 1, 3).reshape(length, change.numbers), label=label)
    return x_TN.view(layout.total, batch, heads, size).permute(1, 2, 0, 3)


def _to_the_owners(comm: Communicator, layout: SequenceLayout, x_TN: torch.Tensor) -> torch.Tensor:
    """Bring what every rank has for the tokens of a block to the rank that holds each token: [P L local, N]."""
    ranks = comm.size
    source = BlockTable.grid([range(ranks + 1), [0, layout.total]], range(ranks), ranks)
    target = BlockTable.grid([[0, ranks], layout.cuts], range(ranks), ranks)
    plan = plan_redistribution((Change(source, target, x_TN.shape[1]),), relabel=False)
    (x_EN,) = redistribute(comm, plan, x_TN, label="partial outputs")
    return x_EN


def _positions(cache: KeyValueCache, rank: int) -> torch.Tensor:
    """The positions in the sequence of the keys that `rank` keeps."""
    blocks = cache.blocks or ()
    starts = accumulate((sum(lengths) for lengths in blocks), initial=cache.dropped)
    return torch.cat(
        [
            torch.arange(start + sum(lengths[:rank]), start + sum(lengths[: rank + 1]), device="cpu")
            for start, lengths in zip(starts, blocks, strict=False)
        ]
    )
