"""Keys and values of sequences that decode side by side in memory of one size, as a captured step needs them.

Shape letters: B rows, H query heads, G key heads, N query heads of a key head, R places of a row, K head size, V
values, W rows of relative positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from dist_attn.ops.device import without_autocast
from dist_attn.ops.softmax_attention.cache import KeyValueCache
from dist_attn.ops.softmax_attention.call import PLAIN, SoftmaxCall, SoftmaxOptions

LEAST_PLACES = 256


def places_for(tokens: int, window: int | None = None) -> int:
    """Places of a row for one token more than so many: a power of two, or as many as hold a window.

    They decide the last bits of a step, and depend on nothing but the row's own text.
    """
    places = max(LEAST_PLACES, 1 << tokens.bit_length())
    return places if window is None else min(places, max(LEAST_PLACES, 1 << (window - 1).bit_length()))


@dataclass(frozen=True)
class CacheSlots:
    """Keys [B, G, R, K] and values [B, G, R, V] of B sequences, of which `tokens_B` int64 came so far.

    Token t of a row lies at t % R, so that a window of at most R tokens is always there. What was never written is 0.
    """

    k_BGRK: torch.Tensor
    v_BGRV: torch.Tensor
    tokens_B: torch.Tensor

    @staticmethod
    def of(caches: Sequence[KeyValueCache | None], window: int | None = None) -> "CacheSlots":
        """Copies of caches of one sequence each, with room for a token more; None for a row without a sequence.

        Raises: InputError for a cache that is spread over ranks.
        """
        like = next(cache for cache in caches if cache is not None)
        places = places_for(max(cache.tokens for cache in caches if cache is not None), window)
        k_BGRK, v_BGRV = (
            t.new_zeros((len(caches), t.shape[1], places, t.shape[3])) for t in (like.k_BGSK, like.v_BGSV)
        )
        slots = CacheSlots(k_BGRK, v_BGRV, torch.zeros(len(caches), dtype=torch.int64, device=k_BGRK.device))
        slots.take(caches)
        return slots

    def take(self, caches: Sequence[KeyValueCache | None]) -> None:
        """Write other caches over those that are here.

        Raises: InputError for a cache that is spread over ranks.
        """
        self.v_BGRV.zero_()  # hidden places weigh 0, and 0 times a NaN that another request has left is NaN
        for row, cache in enumerate(caches):
            tokens = 0
            if cache is not None:
                cache.require_whole()
                tokens = cache.tokens
                at_S = self._places_of(cache.dropped, tokens)
                self.k_BGRK[row].index_copy_(1, at_S, cache.k_BGSK[0].to(self.k_BGRK.dtype))
                self.v_BGRV[row].index_copy_(1, at_S, cache.v_BGSV[0].to(self.v_BGRV.dtype))
            self.tokens_B[row] = tokens

    def row(self, row: int, tokens: int, window: int | None = None) -> KeyValueCache:
        """A copy of a row's cache after so many tokens, with those that its window still reaches."""
        dropped = 0 if window is None else max(0, tokens - window + 1)
        at_S = self._places_of(dropped, tokens)
        k_1GSK, v_1GSV = (t[row : row + 1].index_select(2, at_S) for t in (self.k_BGRK, self.v_BGRV))
        return KeyValueCache(k_1GSK, v_1GSV, dropped=dropped)

    def _places_of(self, start: int, stop: int) -> torch.Tensor:
        return torch.arange(start, stop, device=self.k_BGRK.device) % self.k_BGRK.shape[2]


def softmax_attention_of_slots(
    q_BH1K: torch.Tensor,
    k_BG1K: torch.Tensor,
    v_BG1V: torch.Tensor,
    slots: CacheSlots,
    *,
    options: SoftmaxOptions = PLAIN,
) -> tuple[torch.Tensor, CacheSlots]:
    """`softmax_attention_of_rows` over slots, which take the tokens where they lie: the same operations every time.

    Shapes: q [B, H, 1, K], k [B, G, 1, K], v [B, G, 1, V] -> [B, H, 1, V].
    Cost: all places, whatever is in them.
    Raises: ShapeError for shapes that do not fit together.
    """
    at_B, places = slots.tokens_B, slots.k_BGRK.shape[2]
    k_BGRK, v_BGRV = slots.k_BGRK.to(k_BG1K.dtype), slots.v_BGRV.to(v_BG1V.dtype)
    call = SoftmaxCall(q_BH1K, k_BGRK, v_BGRV, False, options)
    call.check()
    here_B111 = (at_B % places)[:, None, None, None]
    k_BGRK.scatter_(2, here_B111.expand_as(k_BG1K), k_BG1K)
    v_BGRV.scatter_(2, here_B111.expand_as(v_BG1V), v_BG1V)
    # How many tokens before the new one a place's token came; a place that was not written is before the first one.
    behind_BR = (at_B[:, None] - torch.arange(places, device=at_B.device)) % places
    hidden_BR = behind_BR > at_B[:, None]
    if options.window is not None:
        hidden_BR = hidden_BR | (behind_BR >= options.window)
    with without_autocast(q_BH1K.device):
        out_BHV = _attend(call, behind_BR, hidden_BR)
    return out_BHV[:, :, None], CacheSlots(k_BGRK, v_BGRV, at_B + 1)


def _attend(call: SoftmaxCall, behind_BR: torch.Tensor, hidden_BR: torch.Tensor) -> torch.Tensor:
    """The outputs [B, H, V]; scores and weights are float32 or wider."""
    options, (q_BH1K, k_BGRK, v_BGRV) = call.options, call.qkv
    wide, groups = torch.promote_types(q_BH1K.dtype, torch.float32), k_BGRK.shape[1]
    q_BHK = q_BH1K[:, :, 0].to(k_BGRK.dtype)
    scores_BHR = (q_BHK.unflatten(1, (groups, -1)) @ k_BGRK.transpose(-1, -2)).flatten(1, 2).to(wide)
    near_BRW = None
    if options.relative is not None:
        rows, reach = options.relative, options.relative.reach
        near_BRW = F.one_hot((reach - behind_BR).clamp_min(0), 2 * reach + 1).to(wide)
        by_row_BHW = (q_BHK.to(wide)[:, :, None] @ rows.keys_HRK.to(wide).transpose(-1, -2))[:, :, 0]
        scores_BHR = scores_BHR + by_row_BHW @ near_BRW.transpose(-1, -2)
    scores_BHR = scores_BHR * call.score_scale
    if options.softcap is not None:
        scores_BHR = options.softcap * torch.tanh(scores_BHR / options.softcap)
    scores_BHR = scores_BHR.masked_fill(hidden_BR[:, None], float("-inf"))
    if options.sinks_H is not None:
        sinks_BH1 = options.sinks_H.to(wide)[:, None].expand(len(scores_BHR), -1, 1)
        scores_BHR = torch.cat([scores_BHR, sinks_BH1], dim=-1)
    weights_BHR = scores_BHR.softmax(dim=-1)[..., : call.keys]
    weights_BGNR = weights_BHR.unflatten(1, (groups, -1)).to(v_BGRV.dtype)
    out_BHV: torch.Tensor = (weights_BGNR @ v_BGRV).flatten(1, 2)
    if options.relative is not None and options.relative.values_HRV is not None and near_BRW is not None:
        values_HWV = options.relative.values_HRV.to(wide)
        out_BHV = out_BHV + ((weights_BHR @ near_BRW)[:, :, None] @ values_HWV)[:, :, 0].to(out_BHV.dtype)
    return out_BHV
