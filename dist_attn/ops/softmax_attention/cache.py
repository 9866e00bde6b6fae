"""The keys and values that exact attention keeps of the tokens so far, and attention of new tokens over them.

Shape letters: B batch, H query heads, G key heads, L new tokens, S tokens so far, K head size, V values.
"""

from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import torch

from dist_attn.errors import InputError
from dist_attn.ops.documents import check_documents, document_numbers
from dist_attn.ops.softmax_attention.attention import packed_softmax_attention, softmax_attention
from dist_attn.ops.softmax_attention.call import Placement, RelativePositions


@dataclass
class _Room:
    """Memory in which keys and values have more tokens to come behind them; so many of its tokens are taken."""

    k_BGRK: torch.Tensor
    v_BGRV: torch.Tensor
    taken: int

    def takes(self, token: int, k_BG1K: torch.Tensor) -> bool:
        """Whether the next token is to be this one, which may be written here."""
        fits = self.taken == token < self.k_BGRK.shape[2] and self.k_BGRK.dtype == k_BG1K.dtype
        return fits and (torch.is_inference_mode_enabled() or not self.k_BGRK.is_inference())


@dataclass(frozen=True)
class KeyValueCache:
    """Keys [B, G, S, K] and values [B, G, S, V] of all tokens so far, or of the part that this rank keeps.

    `blocks` is None for a cache that is whole. In one that is spread over ranks it says how many tokens of each block
    every rank has kept, block after block: equal on all ranks, and enough to tell where each key stands. `room` is the
    memory that they are the beginning of, where decode steps have left some.
    """

    k_BGSK: torch.Tensor
    v_BGSV: torch.Tensor
    blocks: tuple[tuple[int, ...], ...] | None = None
    room: _Room | None = field(default=None, repr=False, compare=False)

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

    def with_token(self, k_BG1K: torch.Tensor, v_BG1V: torch.Tensor) -> "KeyValueCache":
        """`appended` for one token, of a cache that is whole and has no gradients: in the room behind the others.

        Caches remain values: only the last one that was made of a room is given more of it, and what goes on from an
        earlier one copies. How the result lies depends on the number of its tokens alone, so a cache that was stored
        goes on with the same bits.

        Cost: the token; a copy of all whenever room is made, which is a quarter of them at most.
        """
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return self.appended(k_BG1K, v_BG1V)
        at, room = self.tokens, self.room
        if room is None or not room.takes(at, k_BG1K):
            room = _Room(_with_room(self.k_BGSK, k_BG1K), _with_room(self.v_BGSV, v_BG1V), at)
        room.k_BGRK[:, :, at : at + 1] = k_BG1K
        room.v_BGRV[:, :, at : at + 1] = v_BG1V
        room.taken = at + 1
        return KeyValueCache(room.k_BGRK[:, :, : at + 1], room.v_BGRV[:, :, : at + 1], room=room)

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


def _with_room(x_BGSN: torch.Tensor, like_BG1N: torch.Tensor) -> torch.Tensor:
    """A copy with room for one token more at least, in the type of that one."""
    batch, groups, tokens, size = x_BGSN.shape
    unit = max(64, 1 << max(0, (tokens + 1).bit_length() - 3))
    x_BGRN = like_BG1N.new_empty((batch, groups, (tokens // unit + 1) * unit, size))
    x_BGRN[:, :, :tokens] = x_BGSN
    return x_BGRN


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
    keys_S = torch.arange(past + length, device="cpu")
    queries_L = keys_S[past:]
    if not documents:
        return Placement(queries_L, keys_S)
    number_L = document_numbers(documents, length)
    return Placement(queries_L, keys_S, number_L, torch.cat([number_L.new_zeros(past), number_L]))
