"""Exact softmax attention over layouts: which of its forms a call takes, and first tokens that see each other fully."""

from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from dist_attn.comm import Communicator
from dist_attn.layout import SequenceLayout
from dist_attn.ops import KeyValueCache, RelativePositions, softmax_attention_streaming
from dist_attn.sharded.call_agreement import Setting
from dist_attn.sharded.head_reshuffle import sharded_softmax_attention
from dist_attn.sharded.packed_whole import sharded_packed_softmax_attention
from dist_attn.sharded.ring_attention import ring_attention
from dist_attn.sharded.softmax_streaming import attend_over_spread_cache, attend_over_whole_cache, last_document

SoftmaxExchange = Literal["reshuffle", "ring"]
CacheKept = Literal["spread", "whole"]


@dataclass(frozen=True)
class ShardedSoftmax:
    """Softmax attention of queries on `layout` over keys on `memory`, by one of the ways for both to meet."""

    comm: Communicator
    layout: SequenceLayout
    memory: SequenceLayout
    exchange: SoftmaxExchange
    cache: CacheKept

    def attend(
        self,
        q_BHLK: torch.Tensor,
        k_BGSK: torch.Tensor,
        v_BGSV: torch.Tensor,
        *,
        causal: bool,
        scale: float | None = None,
        prefix: int = 0,
        relative: RelativePositions | None = None,
    ) -> torch.Tensor:
        """`ops.softmax_attention` on this rank's slice, with documents where the layouts have some."""
        attention: SoftmaxAcrossRanks = ring_attention if self.exchange == "ring" else sharded_softmax_attention
        tensors = (q_BHLK, k_BGSK, v_BGSV)
        if prefix:
            return sharded_prefix_softmax(
                attention,
                self.comm,
                self.layout,
                self.memory,
                *tensors,
                scale=scale,
                prefix=prefix,
                relative=relative,
            )
        packed = bool(self.layout.documents or self.memory.documents)
        if packed and self.memory == self.layout:
            return sharded_packed_softmax_attention(
                self.comm,
                self.layout,
                *tensors,
                attention=attention,
                causal=causal,
                scale=scale,
                relative=relative,
            )
        return attention(
            self.comm,
            self.layout,
            *tensors,
            causal=causal,
            scale=scale,
            memory_layout=self.memory,
            relative=relative,
        )

    def attend_stream(
        self,
        q_BHLK: torch.Tensor,
        k_BGLK: torch.Tensor,
        v_BGLV: torch.Tensor,
        cache: KeyValueCache,
        *,
        relative: RelativePositions | None = None,
    ) -> tuple[torch.Tensor, KeyValueCache]:
        """`ops.softmax_attention_streaming` on this rank's slice of a block, and what the cache then holds here."""
        tensors = (q_BHLK, k_BGLK, v_BGLV)
        if self.comm.size == 1:
            return softmax_attention_streaming(
                *tensors, cache, documents=self.layout.documents or (), relative=relative
            )
        if self.cache == "whole":
            return attend_over_whole_cache(self.comm, self.layout, *tensors, cache, relative=relative)
        if cache.tokens:
            return attend_over_spread_cache(self.comm, self.layout, *tensors, cache, relative=relative)
        out_BHLV = self.attend(*tensors, causal=True, relative=relative)
        after = cache.appended(k_BGLK, v_BGLV, (self.layout.lengths,))
        return out_BHLV, last_document(after, self.layout, self.comm.rank)


def relative_settings(relative: RelativePositions | None) -> dict[str, Setting]:
    """What ranks compare of relative positions."""
    keys_HRK, values_HRV = (None, None) if relative is None else (relative.keys_HRK, relative.values_HRV)
    return {"relative_keys": keys_HRK, "relative_values": values_HRV}


class SoftmaxAcrossRanks(Protocol):
    """Exact attention over layouts, however keys and queries meet."""

    def __call__(
        self,
        comm: Communicator,
        layout: SequenceLayout,
        q_BHLK: torch.Tensor,
        k_BGSK: torch.Tensor,
        v_BGSV: torch.Tensor,
        *,
        causal: bool,
        scale: float | None,
        memory_layout: SequenceLayout | None,
        relative: RelativePositions | None,
    ) -> torch.Tensor: ...


def sharded_prefix_softmax(
    attention: SoftmaxAcrossRanks,
    comm: Communicator,
    layout: SequenceLayout,
    memory: SequenceLayout,
    q_BHLK: torch.Tensor,
    k_BGSK: torch.Tensor,
    v_BGSV: torch.Tensor,
    *,
    scale: float | None,
    prefix: int,
    relative: RelativePositions | None = None,
) -> torch.Tensor:
    """`ops.softmax_attention` with a prefix of global tokens, on this rank's slice.

    Cost: that of causal attention over all tokens and of full attention over the prefix; the causal rows of the prefix
        are computed and dropped.
    """
    queries, keys = (SequenceLayout(tuple(min(cut, prefix) for cut in part.cuts)) for part in (layout, memory))
    here, there = queries.lengths[comm.rank], keys.lengths[comm.rank]
    first = attention(
        comm,
        queries,
        q_BHLK[:, :, :here],
        k_BGSK[:, :, :there],
        v_BGSV[:, :, :there],
        causal=False,
        scale=scale,
        memory_layout=keys,
        relative=relative,
    )
    rest = attention(
        comm, layout, q_BHLK, k_BGSK, v_BGSV, causal=True, scale=scale, memory_layout=memory, relative=relative
    )
    return torch.cat([first, rest[:, :, here:]], dim=2)
