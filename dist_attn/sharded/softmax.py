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
from dist_attn.ops import KeyValueCache, RelativePositions, softmax_attention_streaming
from dist_attn.ops.softmax_attention import packed_softmax_attention
from dist_attn.sharded.columns import starts_inside
from dist_attn.sharded.head_reshuffle import sharded_softmax_attention
from dist_attn.sharded.ring_attention import ring_attention
from dist_attn.sharded.sharding import Setting, Sharding
from dist_attn.sharded.softmax_streaming import attend_over_spread_cache, attend_over_whole_cache, last_document

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Attention = Callable[..., torch.Tensor]
"""Exact attention over layouts, however keys and queries meet: of a `Sharding`, q, k and v, and whether `causal`."""


def softmax_over_layouts(
    sharding: Sharding,
    qkv: Tensors,
    *,
    causal: bool,
    scale: float | None = None,
    prefix: int = 0,
    relative: RelativePositions | None = None,
) -> torch.Tensor:
    """`ops.softmax_attention` on this rank's slice, with documents where the layouts have some."""
    attention = ring_attention if sharding.softmax == "ring" else sharded_softmax_attention
    attend = partial(attention, scale=scale, relative=relative)
    if prefix:
        return _with_prefix(attend, sharding, qkv, prefix)
    if sharding.packed and sharding.memory == sharding.layout:
        local = partial(packed_softmax_attention, causal=causal, scale=scale, relative=relative)
        return _packed(partial(attend, causal=causal), local, sharding, qkv)
    return attend(sharding, *qkv, causal=causal)


def softmax_stream_over_layouts(
    sharding: Sharding, qkv: Tensors, cache: KeyValueCache, *, relative: RelativePositions | None = None
) -> tuple[torch.Tensor, KeyValueCache]:
    """`ops.softmax_attention_streaming` on this rank's slice of a block, and what the cache then holds here."""
    layout = sharding.layout
    if sharding.comm.size == 1:
        return softmax_attention_streaming(*qkv, cache, documents=layout.documents or (), relative=relative)
    if sharding.cache == "whole":
        return attend_over_whole_cache(sharding, *qkv, cache, relative=relative)
    if cache.tokens:
        return attend_over_spread_cache(sharding, *qkv, cache, relative=relative)
    out_BHLV = softmax_over_layouts(sharding, qkv, causal=True, relative=relative)
    return out_BHLV, last_document(cache.appended(*qkv[1:], (layout.lengths,)), layout, sharding.comm.rank)


def relative_settings(relative: RelativePositions | None) -> dict[str, Setting]:
    """What ranks compare of relative positions."""
    keys_HRK, values_HRV = (None, None) if relative is None else (relative.keys_HRK, relative.values_HRV)
    return {"relative_keys": keys_HRK, "relative_values": values_HRV}


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


def _packed(attend: Attention, local: Attention, sharding: Sharding, qkv: Tensors) -> torch.Tensor:
    """`ops.softmax_attention` with documents on this rank's slice; queries and keys lie on the same layout.

    Cost: that of `attend` for the tokens of documents that lie on several ranks; nothing where there are none.
    """
    layout, rank = sharding.layout, sharding.comm.rank
    if not layout.crosses_cuts:
        return local(*qkv, documents=layout.documents_on(rank))
    parts = layout.pieces(rank)
    split = [t.split(parts, dim=2) for t in qkv]
    across = replace(sharding, layout=layout.across_cuts, memory=layout.across_cuts)
    across_BHLV = attend(across, *(torch.cat([first, last], dim=2) for first, _, last in split))
    inside_BHLV = local(*(inside for _, inside, _ in split), documents=starts_inside(layout, rank))
    first, last = across_BHLV.split((parts[0], parts[2]), dim=2)
    return torch.cat([first, inside_BHLV, last], dim=2)
