"""Exact softmax attention as a token mixer; its state, the key-value cache, grows with every token."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

import torch

from dist_attn.errors import InputError
from dist_attn.mixers.base import MixerState, require_own, state_zeros
from dist_attn.mixers.heads import ProjectedAttention, RelativeRows, merge_heads, rotate, split_heads
from dist_attn.mixers.narrow_layers import empty_output
from dist_attn.model_config.mixers.attention import SoftmaxConfig
from dist_attn.ops import KeyValueCache, RelativePositions, SequenceOps, SoftmaxOptions, softmax_attention_streaming
from dist_attn.ops.device import send
from dist_attn.ops.softmax_attention import (
    CacheRows,
    CacheSlots,
    places_for,
    softmax_attention_of_rows,
    softmax_attention_of_slots,
)


@dataclass(frozen=True)
class SoftmaxState:
    """Keys and values of all tokens so far, and the last tokens that the short convolution still needs.

    Over several ranks the cache may be spread: then each rank holds another part of this state. `window` is that of the
    attention, whose cache keeps the last window - 1 tokens.
    """

    cache: KeyValueCache
    tail_BKD: torch.Tensor
    window: int | None = None

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors in a fixed order."""
        return (self.cache.k_BGSK, self.cache.v_BGSV, self.tail_BKD)

    def replace(self, tensors: tuple[torch.Tensor, ...]) -> "SoftmaxState":
        """Return a state of the same kind over other tensors."""
        k_BGSK, v_BGSV, tail_BKD = tensors
        return replace(self, cache=replace(self.cache, k_BGSK=k_BGSK, v_BGSV=v_BGSV, room=None), tail_BKD=tail_BKD)

    def standing_at(self, position: int) -> "SoftmaxState":
        """See `GrowingState`; tokens that the window has dropped are told by the position alone."""
        self.cache.require_whole()
        kept = position if self.window is None else min(position, self.window - 1)
        keys, values, dropped = self.cache.k_BGSK.shape[2], self.cache.v_BGSV.shape[2], self.cache.dropped
        if not keys == values == kept or dropped not in (0, position - kept):
            raise InputError(
                f"keys of {keys} tokens and values of {values}, behind {dropped} dropped ones, were given in a state "
                f"at {position}; it needs {kept} of both"
            )
        return self if dropped == position - kept else replace(self, cache=replace(self.cache, dropped=position - kept))


@dataclass(frozen=True)
class SoftmaxRows:
    """The states of sequences of any lengths that decode side by side: each row keeps its own cache."""

    caches: CacheRows
    tail_BKD: torch.Tensor
    window: int | None = None

    @staticmethod
    def of(states: Sequence[SoftmaxState], rows: int) -> "SoftmaxRows":
        """These states, whose caches are not copied; the remaining rows have no cache and the first state's tail."""
        tails = [state.tail_BKD for state in states]
        caches = (*(state.cache for state in states), *[None] * (rows - len(states)))
        return SoftmaxRows(caches, torch.cat(tails + tails[:1] * (rows - len(states))), states[0].window)

    def row(self, index: int) -> SoftmaxState:
        """The state of one sequence, whose cache is not copied."""
        cache = self.caches[index]
        if cache is None:
            raise InputError(f"row {index} of these states is of no sequence")
        return SoftmaxState(cache, self.tail_BKD[index : index + 1].clone(), self.window)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors in a fixed order; those of a cache have a batch of 1."""
        caches = [cache for cache in self.caches if cache is not None]
        return (*(t for cache in caches for t in (cache.k_BGSK, cache.v_BGSV)), self.tail_BKD)

    def replace(self, tensors: tuple[torch.Tensor, ...]) -> "SoftmaxRows":
        """Return states of the same kind over other tensors."""
        given = iter(tensors)
        caches = tuple(
            None if cache is None else replace(cache, k_BGSK=next(given), v_BGSV=next(given), room=None)
            for cache in self.caches
        )
        return replace(self, caches=caches, tail_BKD=next(given))


@dataclass(frozen=True)
class SoftmaxSlots:
    """`SoftmaxRows` in memory of one size, where decode steps may be captured."""

    slots: CacheSlots
    tail_BKD: torch.Tensor
    window: int | None = None

    @staticmethod
    def of(states: SoftmaxState | SoftmaxRows) -> "SoftmaxSlots":
        """Copies of these states, with room for a token more.

        Raises: InputError for caches that are spread over ranks.
        """
        return SoftmaxSlots(CacheSlots.of(_by_row(states), states.window), states.tail_BKD.clone(), states.window)

    @staticmethod
    def steps_left(states: SoftmaxState | SoftmaxRows) -> float:
        """The number of steps that these states may take as slots."""
        longest, places = _longest_and_places(states)
        return math.inf if states.window is not None and states.window <= places else places - longest

    @staticmethod
    def num_bytes(states: SoftmaxState | SoftmaxRows) -> int:
        """The bytes that keys and values of these states take as slots."""
        caches, (_, places) = _by_row(states), _longest_and_places(states)
        like = next(cache for cache in caches if cache is not None)
        of_token = sum(t.shape[1] * t.shape[3] * t.element_size() for t in (like.k_BGSK, like.v_BGSV))
        return len(caches) * places * of_token

    def takes(self, states: SoftmaxState | SoftmaxRows) -> bool:
        """Return whether `take` can be given these, whose own slots would be like those here."""
        caches, (batch, groups, places, size) = _by_row(states), self.slots.k_BGRK.shape
        like = next(cache for cache in caches if cache is not None)
        sizes = (like.k_BGSK.shape[1], like.k_BGSK.shape[3], like.v_BGSV.shape[3])
        alike = (len(caches), sizes, states.window) == (batch, (groups, size, self.slots.v_BGRV.shape[3]), self.window)
        return alike and states.tail_BKD.shape == self.tail_BKD.shape and _longest_and_places(states)[1] == places

    def take(self, states: SoftmaxState | SoftmaxRows) -> None:
        """Write other states over these."""
        self.slots.take(_by_row(states))
        self.tail_BKD.copy_(states.tail_BKD)

    def row(self, index: int, tokens: int) -> SoftmaxState:
        """A copy of the state of one sequence, which has so many tokens."""
        cache = self.slots.row(index, tokens, self.window)
        return SoftmaxState(cache, self.tail_BKD[index : index + 1].clone(), self.window)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors in a fixed order."""
        return (self.slots.k_BGRK, self.slots.v_BGRV, self.slots.tokens_B, self.tail_BKD)

    def replace(self, tensors: tuple[torch.Tensor, ...]) -> "SoftmaxSlots":
        """Make states of this kind over other tensors."""
        *slots, tail_BKD = tensors
        return replace(self, slots=CacheSlots(*slots), tail_BKD=tail_BKD)


def _by_row(states: SoftmaxState | SoftmaxRows) -> CacheRows:
    """The cache of each sequence."""
    if isinstance(states, SoftmaxRows):
        return states.caches
    cache = states.cache
    pairs = zip(cache.k_BGSK.split(1), cache.v_BGSV.split(1), strict=True)
    return tuple(replace(cache, k_BGSK=k_1GSK, v_BGSV=v_1GSV, room=None) for k_1GSK, v_1GSV in pairs)


def _longest_and_places(states: SoftmaxState | SoftmaxRows) -> tuple[int, int]:
    """Tokens of the longest sequence, and the places of its slot."""
    longest = max(cache.tokens for cache in _by_row(states) if cache is not None)
    return longest, places_for(longest, states.window)


@final
class SoftmaxAttention(ProjectedAttention):
    """Multi-head causal softmax attention, the exact baseline of every kernel mixer.

    `step` goes on from a state that holds all keys.
    """

    config: SoftmaxConfig

    def __init__(self, config: SoftmaxConfig) -> None:
        super().__init__(config)
        self.relative: RelativeRows | None = None
        if config.relative is not None:
            sizes = (config.num_heads, config.head_size, config.value_size)
            self.relative = RelativeRows(config.relative, *sizes, causal=True)

    def forward(
        self, x_BLD: torch.Tensor, ops: SequenceOps, state: MixerState | None = None
    ) -> tuple[torch.Tensor, SoftmaxState]:
        before = self._own(state, x_BLD.shape[0])
        x_BLD, tail_BKD = self.convolved(x_BLD, ops, before.tail_BKD)
        q, k, v, *_ = self.heads(x_BLD)
        positions_1L = ops.positions(x_BLD.shape[1], x_BLD.device)[None] + before.cache.tokens
        q, k = (rotate(t, positions_1L, self.config.rotary) for t in (q, k))
        out_BHLV, cache = ops.softmax_attention_streaming(q, k, v, before.cache, relative=self._rows())
        return self.out(merge_heads(out_BHLV)), SoftmaxState(cache, tail_BKD)

    def step(
        self, x_BD: torch.Tensor, state: MixerState
    ) -> tuple[torch.Tensor, SoftmaxState | SoftmaxRows | SoftmaxSlots]:
        if isinstance(state, SoftmaxRows):
            return self._step_rows(x_BD, state)
        if isinstance(state, SoftmaxSlots):
            return self._step_slots(x_BD, state)
        before = self._own(state, x_BD.shape[0])
        before.cache.require_whole()
        position_11 = torch.full((1, 1), before.cache.tokens, device=x_BD.device)
        q, k, v, tail_BKD = self._step_heads(x_BD, before.tail_BKD, position_11)
        options = SoftmaxOptions(relative=self._rows())
        out_BH1V, cache = softmax_attention_streaming(q, k, v, before.cache, options=options)
        return self.out(out_BH1V.flatten(1)), SoftmaxState(cache, tail_BKD.contiguous())

    def _step_rows(self, x_BD: torch.Tensor, state: SoftmaxRows) -> tuple[torch.Tensor, SoftmaxRows]:
        positions = [[0 if cache is None else cache.tokens] for cache in state.caches]
        position_B1 = send(torch.tensor(positions, device="cpu"), x_BD.device)
        q, k, v, tail_BKD = self._step_heads(x_BD, state.tail_BKD, position_B1)
        options = SoftmaxOptions(relative=self._rows())
        out_BH1V, caches = softmax_attention_of_rows(q, k, v, state.caches, options=options)
        return self.out(out_BH1V.flatten(1)), SoftmaxRows(caches, tail_BKD.contiguous())

    def _step_slots(self, x_BD: torch.Tensor, state: SoftmaxSlots) -> tuple[torch.Tensor, SoftmaxSlots]:
        q, k, v, tail_BKD = self._step_heads(x_BD, state.tail_BKD, state.slots.tokens_B[:, None])
        options = SoftmaxOptions(relative=self._rows())
        out_BH1V, slots = softmax_attention_of_slots(q, k, v, state.slots, options=options)
        return self.out(out_BH1V.flatten(1)), SoftmaxSlots(slots, tail_BKD.contiguous())

    def _step_heads(
        self, x_BD: torch.Tensor, tail_BKD: torch.Tensor, position_B1: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values of one token at these positions, and the tail after it."""
        x_BD, tail_BKD = self.convolved_step(x_BD, tail_BKD)
        sizes, heads = self.config.qkv_sizes, self.config.num_heads
        q, k, v = (split_heads(t[:, None], heads) for t in self.qkv(x_BD).split(sizes, dim=-1))
        q, k = (rotate(t, position_B1, self.config.rotary) for t in (q, k))
        return q, k, v, tail_BKD

    def initial_state(self, batch: int) -> SoftmaxState:
        config, like = self.config, empty_output(self.qkv)
        none = (batch, config.num_heads, 0)
        cache = KeyValueCache(
            state_zeros(like, (*none, config.head_size)),
            state_zeros(like, (*none, config.value_size)),
        )
        return SoftmaxState(cache, self.initial_tail(batch))

    def _rows(self) -> RelativePositions | None:
        return None if self.relative is None else self.relative()

    def _own(self, state: MixerState | None, batch: int) -> SoftmaxState:
        if state is None:
            return self.initial_state(batch)
        config, heads = self.config, (batch, self.config.num_heads, None)  # any number of keys
        tail = (batch, max(0, config.short_convolution - 1), config.hidden_size)
        shapes = [(*heads, config.head_size), (*heads, config.value_size), tail]
        return require_own(state, SoftmaxState, config.kind, shapes)
