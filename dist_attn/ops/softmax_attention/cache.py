"""The keys and values that exact attention keeps of the tokens so far, and attention of new tokens over them.

Shape letters: B batch, H query heads, G key heads, L new tokens, S tokens so far, K head size, V values.
"""

from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import ClassVar

import torch

from dist_attn.errors import InputError
from dist_attn.ops.documents import check_documents, document_numbers
from dist_attn.ops.sequence_call import SequenceCall, local_form
from dist_attn.ops.softmax_attention.attention import attend_after, attend_documents, attend_exactly
from dist_attn.ops.softmax_attention.call import PLAIN, QueryPlacement, SoftmaxCall, SoftmaxOptions


@dataclass
class _Room:
    """Memory of the keys and values of tokens from `first` on, with more to come; those before `taken` are in it."""

    k_BGRK: torch.Tensor
    v_BGRV: torch.Tensor
    first: int
    taken: int

    def takes(self, token: int, k_BGLK: torch.Tensor) -> bool:
        """Return whether tokens from number `token` on come next and their keys and values may be written here."""
        end = self.first + self.k_BGRK.shape[2]
        fits = self.taken == token <= end - k_BGLK.shape[2] and self.k_BGRK.dtype == k_BGLK.dtype
        return fits and (torch.is_inference_mode_enabled() or not self.k_BGRK.is_inference())


@dataclass(frozen=True)
class KeyValueCache:
    """Keys [B, G, S, K] and values [B, G, S, V] of all tokens so far, or of the part that this rank keeps.

    `blocks` is None for a cache that is whole. In one that is spread over ranks it says how many tokens of each block
    every rank has kept, block after block: equal on all ranks, and enough to tell where each key stands. `dropped`
    tokens came before all of these, and no later token sees them through its window. `room` is the memory that they lie
    in, where decode steps have left some.
    """

    k_BGSK: torch.Tensor
    v_BGSV: torch.Tensor
    blocks: tuple[tuple[int, ...], ...] | None = None
    dropped: int = 0
    room: _Room | None = field(default=None, repr=False, compare=False)

    @property
    def whole(self) -> bool:
        """Return whether the keys of all tokens are here."""
        return self.blocks is None

    @property
    def tokens(self) -> int:
        """Tokens so far, wherever their keys are, with those that were dropped."""
        return self.dropped + (self.k_BGSK.shape[2] if self.blocks is None else sum(map(sum, self.blocks)))

    def appended(
        self, k_BGLK: torch.Tensor, v_BGLV: torch.Tensor, blocks: tuple[tuple[int, ...], ...] | None = None
    ) -> "KeyValueCache":
        """Append the keys and values of more tokens, in memory of its own."""
        k_BGSK = torch.cat([self.k_BGSK.to(k_BGLK.dtype), k_BGLK], dim=2)
        v_BGSV = torch.cat([self.v_BGSV.to(v_BGLV.dtype), v_BGLV], dim=2)
        return KeyValueCache(k_BGSK, v_BGSV, blocks, self.dropped)

    def with_token(self, k_BG1K: torch.Tensor, v_BG1V: torch.Tensor) -> "KeyValueCache":
        """`appended` for one token, of a cache that is whole and has no gradients: in the room behind the others.

        Caches remain values: only the last one that was made of a room is given more of it, and what goes on from an
        earlier one copies. How the result lies depends on the numbers of tokens and of dropped ones alone, so a cache
        that was stored goes on with the same bits.

        Cost: the token; a copy of all tokens whenever room is made: for at most a quarter as many, or for 64 if more.
        """
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return self.appended(k_BG1K, v_BG1V)
        after = self.with_places(k_BG1K, v_BG1V)
        after.k_BGSK[:, :, -1:] = k_BG1K
        after.v_BGSV[:, :, -1:] = v_BG1V
        return after

    def with_places(self, k_BGLK: torch.Tensor, v_BGLV: torch.Tensor) -> "KeyValueCache":
        """`with_token` of such tokens, whose keys and values are yet to be written into the last places."""
        at, room = self.tokens, self.room
        if room is None or not room.takes(at, k_BGLK):
            room = self._with_room(k_BGLK, v_BGLV)
        room.taken = at + k_BGLK.shape[2]
        first = self.dropped - room.first
        k_BGSK = room.k_BGRK.narrow(2, first, room.taken - self.dropped)
        v_BGSV = room.v_BGRV.narrow(2, first, room.taken - self.dropped)
        return KeyValueCache(k_BGSK, v_BGSV, self.blocks, self.dropped, room)

    def _with_room(self, k_BGLK: torch.Tensor, v_BGLV: torch.Tensor) -> _Room:
        """A copy with room for so many tokens more at least, in the types of those.

        Rooms end at multiples of a unit and begin where those do that were made as the last one ended: a cache that
        was stored in the middle of a room gets the same.
        """
        at, kept, more = self.tokens, self.k_BGSK.shape[2], k_BGLK.shape[2]
        unit = max(64, 1 << max(0, (kept + more).bit_length() - 3))
        first, end = max(0, self.dropped - at % unit), ((at + more - 1) // unit + 1) * unit
        k_BGRK, v_BGRV = (
            like.new_empty((*x.shape[:2], end - first, x.shape[3]))
            for x, like in ((self.k_BGSK, k_BGLK), (self.v_BGSV, v_BGLV))
        )
        k_BGRK[:, :, self.dropped - first : at - first] = self.k_BGSK
        v_BGRV[:, :, self.dropped - first : at - first] = self.v_BGSV
        return _Room(k_BGRK, v_BGRV, first, taken=at)

    def since(self, token: int, rank: int = 0) -> "KeyValueCache":
        """Without the tokens before this one, from which positions then count, in memory of its own.

        `rank` is who holds a part of a spread cache.
        """
        dropped = max(0, self.dropped - token)
        if self.blocks is None:
            keep, blocks = self.tokens - token - dropped, None
        else:
            blocks, position = [], self.dropped
            for lengths in self.blocks:
                edges = list(accumulate(lengths, initial=position))
                blocks.append(tuple(max(0, stop - max(start, token)) for start, stop in pairwise(edges)))
                position = edges[-1]
            keep = sum(lengths[rank] for lengths in blocks)
        gone = self.k_BGSK.shape[2] - keep
        kept = None if blocks is None else tuple(lengths for lengths in blocks if any(lengths))
        return KeyValueCache(self.k_BGSK[:, :, gone:].clone(), self.v_BGSV[:, :, gone:].clone(), kept, dropped)

    def within(self, window: int | None, rank: int = 0) -> "KeyValueCache":
        """Without the tokens outside the window of every later token: the last window - 1 stay, at their positions.

        In memory of its own, or in its room. Of a spread cache, `rank` is the rank whose part this is.
        """
        first = self.dropped if window is None else max(self.dropped, self.tokens - window + 1)
        if first == self.dropped:
            return self
        if self.room is None:
            return replace(self.since(first, rank), dropped=first)
        kept = slice(first - self.dropped, None)
        return replace(self, k_BGSK=self.k_BGSK[:, :, kept], v_BGSV=self.v_BGSV[:, :, kept], dropped=first)

    def require_whole(self) -> None:
        """Raises: InputError for a cache that is spread over ranks."""
        if self.blocks is not None:
            raise InputError(
                "this state of softmax attention holds one rank's share of the keys, so no rank can go on with it "
                "alone; go on over the same ranks, or make the state with cache='whole'"
            )


CacheRows = tuple[KeyValueCache | None, ...]
"""The caches of sequences of any lengths that decode side by side, each of batch 1; None for a row without one."""


def softmax_attention_streaming(
    q_BHLK: torch.Tensor,
    k_BGLK: torch.Tensor,
    v_BGLV: torch.Tensor,
    cache: KeyValueCache,
    *,
    documents: tuple[int, ...] = (),
    options: SoftmaxOptions = PLAIN,
) -> tuple[torch.Tensor, KeyValueCache]:
    """Causal attention of the L tokens after a cache over all tokens so far, and the cache after them.

    Where documents start among the tokens, each sees itself alone, and the cache keeps the last of them. With a window
    the cache keeps its last window - 1 tokens.
    Shapes: q [B, H, L, K], k [B, G, L, K], v [B, G, L, V] -> [B, H, L, V].
    Memory: the cache, and a copy of it while it grows; one token without gradients goes into its room (`with_token`).
    Raises: InputError for a cache that is spread over ranks, ShapeError for shapes that do not fit together.
    """
    return attend_onward(SoftmaxCall(q_BHLK, k_BGLK, v_BGLV, True, options), cache, documents)


@dataclass(frozen=True)
class SoftmaxStreamCall(SequenceCall[tuple[torch.Tensor, KeyValueCache]]):
    """The arguments of `softmax_attention_streaming`, which explains them."""

    q_BHLK: torch.Tensor
    k_BGLK: torch.Tensor
    v_BGLV: torch.Tensor
    cache: KeyValueCache
    options: SoftmaxOptions = PLAIN

    operation: ClassVar[str] = "softmax_attention_streaming"
    along: ClassVar[tuple[str, ...]] = ("q_BHLK", "k_BGLK", "v_BGLV")
    of_rank: ClassVar[tuple[str, ...]] = ("cache",)
    dim: ClassVar[int] = 2

    @property
    def call(self) -> SoftmaxCall:
        """The causal call of the new tokens alone."""
        return SoftmaxCall(self.q_BHLK, self.k_BGLK, self.v_BGLV, True, self.options)


@local_form(SoftmaxStreamCall)
def attend_stream(stream: SoftmaxStreamCall) -> tuple[torch.Tensor, KeyValueCache]:
    """`softmax_attention_streaming` of its call."""
    return attend_onward(stream.call, stream.cache, stream.documents)


def attend_onward(
    call: SoftmaxCall, cache: KeyValueCache, documents: tuple[int, ...]
) -> tuple[torch.Tensor, KeyValueCache]:
    """`softmax_attention_streaming` of a causal call.

    Raises: as `softmax_attention_streaming`.
    """
    cache.require_whole()
    check_documents(documents, call.queries)
    if call.queries == 1 and not documents:
        return _attend_one_token(call, cache)
    past, after = cache.tokens, cache.appended(*call.qkv[1:])
    if past:
        found = None if documents or not cache.k_BGSK.shape[2] else attend_after(call, cache.k_BGSK, cache.v_BGSV)
        if found is None:
            placement = streaming_placement(past, call.queries, documents, cache.dropped)
            found = attend_exactly(call.over(after.k_BGSK, after.v_BGSV, placement))
        out_BHLV = found
    elif documents:
        out_BHLV = attend_documents(call, documents)
    else:
        out_BHLV = attend_exactly(call)
    after = after.since(past + documents[-1]) if documents else after
    return out_BHLV, after.within(call.options.window)


def _attend_one_token(call: SoftmaxCall, cache: KeyValueCache) -> tuple[torch.Tensor, KeyValueCache]:
    """The decode step: a token that sees all keys which are within its window."""
    options, (_, k_BG1K, v_BG1V) = call.options, call.qkv
    after = cache.within(options.window).with_token(k_BG1K, v_BG1V)
    placement = None
    if options.relative is not None:
        placement = streaming_placement(cache.tokens, 1, (), after.dropped)
    out_BH1V = attend_exactly(replace(call.over(after.k_BGSK, after.v_BGSV, placement), causal=False))
    return out_BH1V, after.within(options.window)


def softmax_attention_of_rows(
    q_BH1K: torch.Tensor,
    k_BG1K: torch.Tensor,
    v_BG1V: torch.Tensor,
    caches: CacheRows,
    *,
    options: SoftmaxOptions = PLAIN,
) -> tuple[torch.Tensor, CacheRows]:
    """`softmax_attention_streaming` for one token of each row, after its own cache; zeros where there is no sequence.

    Raises: as there.
    """
    outputs: list[torch.Tensor] = []
    after: list[KeyValueCache | None] = []
    for q, k, v, cache in zip(q_BH1K.split(1), k_BG1K.split(1), v_BG1V.split(1), caches, strict=True):
        if cache is None:
            outputs.append(v.new_zeros((*q.shape[:3], v.shape[3])))
            after.append(None)
            continue
        # A copy: a product's last bits may depend on where its numbers begin, and rows begin anywhere.
        output, kept = softmax_attention_streaming(q.clone(), k, v, cache, options=options)
        outputs.append(output)
        after.append(kept)
    return torch.cat(outputs), tuple(after)


def streaming_placement(past: int, length: int, documents: tuple[int, ...], dropped: int) -> QueryPlacement:
    """The placement of `length` tokens after `past` ones, which belong to one document, and of all these keys.

    There are none of the first `dropped` tokens.
    """
    keys_S = torch.arange(dropped, past + length, device="cpu")
    queries_L = keys_S[past - dropped :]
    if not documents:
        return QueryPlacement(queries_L, keys_S)
    number_L = document_numbers(documents, length)
    return QueryPlacement(queries_L, keys_S, number_L, torch.cat([number_L.new_zeros(past - dropped), number_L]))
