"""The keys and values that exact attention keeps of the tokens so far, and attention of new tokens over them.

Shape letters: B batch, H query heads, G key heads, L new tokens, S tokens so far, K head size, V values.
"""

from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

from dist_attn.errors import InputError
from dist_attn.ops.documents import check_documents, document_numbers
from dist_attn.ops.softmax_attention.attention import packed_softmax_attention, softmax_attention
from dist_attn.ops.softmax_attention.call import Placement, RelativePositions


@dataclass(frozen=True)
class KeyValueCache:
    """Keys [B, G, S, K] and values [B, G, S, V] of all tokens so far, or of the part that this rank keeps.

    `blocks` is None for a cache that is whole. In one that is spread over ranks it says how many tokens of each block
    every rank has kept, block after block: equal on all ranks, and enough to tell where each key stands.
    """

    k_BGSK: torch.Tensor
    v_BGSV: torch.Tensor
    blocks: tuple[tuple[int, ...], ...] | None = None

    @property
    def whole(self) -> bool:
        """Whether the keys of all tokens are here."""
        return self.blocks is None

    @property
    def tokens(self) -> int:
        """Tokens so far, wherever their keys are."""
        return self.k_BGSK.shape[2] if self.blocks is None else sum(map(sum, self.blocks))

    def appended(
        self, k_BGLK: torch.Tensor, v_BGLV: torch.Tensor, blocks: tuple[tuple[int, ...], ...] | None = None
    ) -> "KeyValueCache":
        """With the keys and values of more tokens behind those that are here, in memory of its own."""
        k_BGSK = torch.cat([self.k_BGSK.to(k_BGLK.dtype), k_BGLK], dim=2)
        return KeyValueCache(k_BGSK, torch.cat([self.v_BGSV.to(v_BGLV.dtype), v_BGLV], dim=2), blocks)

    def since(self, token: int, rank: int = 0) -> "KeyValueCache":
        """Without the tokens before this one, in memory of its own; `rank` is who holds a part of a spread cache."""
        if self.blocks is None:
            keep, blocks = self.tokens - token, None
        else:
            blocks, position = [], 0
            for lengths in self.blocks:
                edges = list(accumulate(lengths, initial=position))
                blocks.append(tuple(max(0, stop - max(start, token)) for start, stop in pairwise(edges)))
                position = edges[-1]
            keep = sum(lengths[rank] for lengths in blocks)
        gone = self.k_BGSK.shape[2] - keep
        kept = None if blocks is None else tuple(lengths for lengths in blocks if any(lengths))
        return KeyValueCache(self.k_BGSK[:, :, gone:].clone(), self.v_BGSV[:, :, gone:].clone(), kept)

    def require_whole(self) -> None:
        """Raises: InputError for a cache that is spread over ranks."""
        if self.blocks is not None:
            raise InputError(
                "this state of softmax attention holds one rank's share of the keys, so no rank can go on with it "
                "alone; go on over the same ranks, or make the state with cache='whole'"
            )


def softmax_attention_streaming(
    q_BHLK: torch.Tensor,
    k_BGLK: torch.Tensor,
    v_BGLV: torch.Tensor,
    cache: KeyValueCache,
    *,
    documents: tuple[int, ...] = (),
    relative: RelativePositions | None = None,
) -> tuple[torch.Tensor, KeyValueCache]:
    """Causal `softmax_attention` of the L tokens after a cache over all tokens so far, and the cache after them.

    Where documents start among the tokens, each sees itself alone, and the cache keeps the last of them.
    Memory: the cache, and a copy of it while it grows.
    Raises: InputError for a cache that is spread over ranks, ShapeError for shapes that do not fit together.
    """
    cache.require_whole()
    past, length = cache.tokens, q_BHLK.shape[2]
    check_documents(documents, length)
    after = cache.appended(k_BGLK, v_BGLV)
    if past:
        placement = streaming_placement(past, length, documents)
        out_BHLV = softmax_attention(
            q_BHLK, after.k_BGSK, after.v_BGSV, causal=True, placement=placement, relative=relative
        )
    elif documents:
        out_BHLV = packed_softmax_attention(q_BHLK, k_BGLK, v_BGLV, causal=True, documents=documents, relative=relative)
    else:
        out_BHLV = softmax_attention(q_BHLK, k_BGLK, v_BGLV, causal=True, relative=relative)
    return out_BHLV, after.since(past + documents[-1]) if documents else after


def streaming_placement(past: int, length: int, documents: tuple[int, ...]) -> Placement:
    """Where a block of `length` tokens stands after `past` ones, which belong to one document, and all these keys."""
    queries_L, keys_S = torch.arange(past, past + length), torch.arange(past + length)
    if not documents:
        return Placement(queries_L, keys_S)
    number_L = document_numbers(documents, length)
    return Placement(queries_L, keys_S, number_L, torch.cat([number_L.new_zeros(past), number_L]))
