"""Exact softmax attention over layouts: which of its forms a call takes, first tokens that see each other fully.

Of packed documents those that lie whole on a rank are the local operation's. The tokens of documents that lie on
several ranks are a sequence with a layout of its own, which attends as any other.

Shape letters: B batch, H heads of queries, G of keys, L queries and S keys here, K key size, V value size.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from dist_attn.layout import SequenceLayout
from dist_attn.ops import KeyValueCache, softmax_attention_streaming
from dist_attn.ops.softmax_attention import SoftmaxCall
from dist_attn.ops.softmax_attention.attention import attend_documents
from dist_attn.sharded.columns import starts_inside
from dist_attn.sharded.head_reshuffle import sharded_softmax_attention
from dist_attn.sharded.ring_attention import ring_attention
from dist_attn.sharded.sharding import Sharding
from dist_attn.sharded.softmax_streaming import attend_over_spread_cache, attend_over_whole_cache, last_document

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Attention = Callable[..., torch.Tensor]
"""Exact attention over layouts, however keys and queries meet: of a `Sharding`, q, k and v, and whether `causal`."""


def softmax_over_layouts(sharding: Sharding, call: SoftmaxCall) -> torch.Tensor:
    """`ops.softmax_attention` on this rank's slice, with documents where the layouts have some."""
    attention = ring_attention if sharding.softmax == "ring" else sharded_softmax_attention
    attend = partial(attention, options=call.options)
    if call.prefix:
        return _with_prefix(attend, sharding, call.qkv, call.prefix)
    if sharding.packed and sharding.memory == sharding.layout:
        return _packed(partial(attend, causal=call.causal), call, sharding)
    return attend(sharding, *call.qkv, causal=call.causal)


def softmax_stream_over_layouts(
    sharding: Sharding, call: SoftmaxCall, cache: KeyValueCache
) -> tuple[torch.Tensor, KeyValueCache]:
    """`ops.softmax_attention_streaming` on this rank's slice of a block, and what the cache then holds here."""
    layout, options = sharding.layout, call.options
    if sharding.comm.size == 1:
        return softmax_attention_streaming(*call.qkv, cache, documents=layout.documents or (), options=options)
    if sharding.cache == "whole":
        return attend_over_whole_cache(sharding, *call.qkv, cache, options=options)
    if cache.tokens:
        return attend_over_spread_cache(sharding, *call.qkv, cache, options=options)
    out_BHLV = softmax_over_layouts(sharding, call)
    after = last_document(cache.appended(*call.qkv[1:], (layout.lengths,)), layout, sharding.comm.rank)
    return out_BHLV, after.within(options.window, sharding.comm.rank)


def _with_prefix(attend: Attention, sharding: Sharding, qkv: Tensors, prefix: int) -> torch.Tensor:
    """`ops.softmax_attention` with a prefix of global tokens, on this rank's slice.

    Cost: that of causal attention over all tokens and of full attention over the prefix; the causal rows of the prefix
        are computed and dropped.
    """
    queries, keys = (
        SequenceLayout(tuple(min(cut, prefix) for cut in part.cuts)) for part in (sharding.layout, sharding.memory)
    )
    here, there = queries.lengths[sharding.comm.rank], keys.lengths[sharding.comm.rank]
    parts = (t[:, :, :count] for t, count in zip(qkv, (here, there, there), strict=True))
    first = attend(replace(sharding, layout=queries, memory=keys), *parts, causal=False)
    rest = attend(sharding, *qkv, causal=True)
    return torch.cat([first, rest[:, :, here:]], dim=2)


def _packed(attend: Attention, call: SoftmaxCall, sharding: Sharding) -> torch.Tensor:
    """`ops.softmax_attention` with documents on this rank's slice; queries and keys lie on the same layout.

    Cost: that of `attend` for the tokens of documents that lie on several ranks; nothing where there are none.
    """
    layout, rank = sharding.layout, sharding.comm.rank
    if not layout.crosses_cuts:
        return attend_documents(call, layout.documents_on(rank))
    parts = layout.pieces(rank)
    split = [t.split(parts, dim=2) for t in call.qkv]
    across = replace(sharding, layout=layout.across_cuts, memory=layout.across_cuts)
    across_BHLV = attend(across, *(torch.cat([first, last], dim=2) for first, _, last in split))
    inside = call.with_qkv(*(inside for _, inside, _ in split))
    inside_BHLV = attend_documents(inside, starts_inside(layout, rank))
    first, last = across_BHLV.split((parts[0], parts[2]), dim=2)
    return torch.cat([first, inside_BHLV, last], dim=2)
