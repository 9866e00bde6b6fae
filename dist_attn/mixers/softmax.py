"""Exact softmax attention as a token mixer; its state, the key-value cache, grows with every token."""

from dataclasses import dataclass

import torch
from torch import nn

from dist_attn.errors import InputError
from dist_attn.mixers.base import MixerState, TokenMixer
from dist_attn.mixers.config import SoftmaxConfig
from dist_attn.mixers.heads import ShortConvolution, merge_heads, split_heads
from dist_attn.ops import LocalSequenceOps, SequenceOps

__all__ = ["SoftmaxAttention", "SoftmaxState"]


@dataclass(frozen=True)
class SoftmaxState:
    """Keys and values of all tokens so far, and the last tokens that the short convolution still needs."""

    k_BHSK: torch.Tensor
    v_BHSV: torch.Tensor
    tail_BKD: torch.Tensor

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors in a fixed order."""
        return (self.k_BHSK, self.v_BHSV, self.tail_BKD)

    def replace(self, tensors: tuple[torch.Tensor, ...]) -> "SoftmaxState":
        """The same kind of state over other tensors."""
        return SoftmaxState(*tensors)


class SoftmaxAttention(TokenMixer):
    """Multi-head causal softmax attention, the exact baseline of every kernel mixer.

    Raises: InputError for a sequence that is spread over several ranks.
    """

    def __init__(self, config: SoftmaxConfig) -> None:
        super().__init__()
        self.config = config
        size = config.hidden_size
        self.convolution = ShortConvolution(size, config.short_convolution) if config.short_convolution else None
        self.qkv = nn.Linear(size, 3 * size, bias=False)
        self.out = nn.Linear(size, size, bias=False)

    def forward(
        self, x_BLD: torch.Tensor, ops: SequenceOps, state: MixerState | None = None
    ) -> tuple[torch.Tensor, SoftmaxState]:
        if not ops.whole:
            # The outputs could be had over ranks, but a state of this rank's keys alone would be taken for all keys.
            raise InputError(
                "a softmax mixer was given a sequence that is spread over several ranks; its state holds every key and "
                "value, so it runs on one rank. Use one rank, or a kernel mixer (rfa, rfa_gate)"
            )
        before = self._own(state, x_BLD.shape[0])
        tail_BKD = before.tail_BKD
        if self.convolution is not None:
            x_BLD, tail_BKD = self.convolution(x_BLD, ops, tail_BKD)
        q, k, v = (split_heads(t, self.config.num_heads) for t in self.qkv(x_BLD).chunk(3, dim=-1))
        past = before.k_BHSK.shape[2]
        k, v = torch.cat([before.k_BHSK.to(k.dtype), k], dim=2), torch.cat([before.v_BHSV.to(v.dtype), v], dim=2)
        # Queries after a cache: rows of zeros stand for the past ones, so that the top-left alignment holds.
        q = torch.cat([q.new_zeros((*q.shape[:2], past, q.shape[3])), q], dim=2)
        out_BHLV = ops.softmax_attention(q, k, v, causal=True)[:, :, past:]
        return self.out(merge_heads(out_BHLV)), SoftmaxState(k, v, tail_BKD)

    def step(self, x_BD: torch.Tensor, state: MixerState) -> tuple[torch.Tensor, SoftmaxState]:
        before = self._own(state, x_BD.shape[0])
        tail_BKD = before.tail_BKD
        if self.convolution is not None:
            x_BD, tail_BKD = self.convolution.step(x_BD, tail_BKD)
        q, k, v = (split_heads(t[:, None], self.config.num_heads) for t in self.qkv(x_BD).chunk(3, dim=-1))
        k, v = torch.cat([before.k_BHSK, k], dim=2), torch.cat([before.v_BHSV, v], dim=2)
        out_BH1V = LocalSequenceOps().softmax_attention(q, k, v, causal=False)
        return self.out(out_BH1V.flatten(1)), SoftmaxState(k, v, tail_BKD)

    def initial_state(self, batch: int) -> SoftmaxState:
        config, weight = self.config, self.qkv.weight
        empty = weight.new_zeros((batch, config.num_heads, 0, config.head_size), requires_grad=False)
        if self.convolution is None:
            return SoftmaxState(empty, empty, weight.new_zeros((batch, 0, config.hidden_size), requires_grad=False))
        return SoftmaxState(empty, empty, self.convolution.initial_tail(batch))

    def _own(self, state: MixerState | None, batch: int) -> SoftmaxState:
        if state is None:
            return self.initial_state(batch)
        if not isinstance(state, SoftmaxState):
            raise InputError(f"a {type(state).__name__} was given to softmax attention; it needs its own state")
        return state
