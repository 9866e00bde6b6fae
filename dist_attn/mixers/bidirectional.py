"""Self-attention in which every token sees every other, before and after it."""

from typing import NoReturn, final

import torch
from torch import nn

from dist_attn.errors import InputError
from dist_attn.mixers.base import MixerState, Paradigm, TokenMixer
from dist_attn.mixers.heads import merge_heads, split_heads
from dist_attn.mixers.kernels import AllKeys
from dist_attn.mixers.whole_sequence import NoState
from dist_attn.model_config.mixers.all_keys import BidirectionalConfig
from dist_attn.ops import SequenceOps


@final
class BidirectionalAttention(TokenMixer):
    """Multi-head attention over all tokens by any kernel; it takes a sequence whole and cannot be streamed.

    Reference: Random Feature Attention, Eq. 5; Scaleformer, Eq. 9 without a mask; Introduction to Transformers, Sec. 3.
    """

    paradigm = Paradigm.LEARNED_DEPENDENT

    def __init__(self, config: BidirectionalConfig) -> None:
        super().__init__()
        self.config = config
        size = config.hidden_size
        self.qkv = nn.Linear(size, sum(config.qkv_sizes), bias=config.projection_bias)
        self.out = nn.Linear(config.qkv_sizes[2], size, bias=config.projection_bias)
        self.attend = AllKeys(config)

    def forward(
        self, x_BLD: torch.Tensor, ops: SequenceOps, state: MixerState | None = None
    ) -> tuple[torch.Tensor, NoState]:
        if state is not None and not isinstance(state, NoState):
            raise InputError(f"a {type(state).__name__} was given to bidirectional attention, which takes no state")
        q, k, v = (split_heads(t, self.config.num_heads) for t in self.qkv(x_BLD).split(self.config.qkv_sizes, dim=-1))
        out_BHLV, _ = self.attend(q, k, v, ops)
        return self.out(merge_heads(out_BHLV)), NoState()

    def step(self, x_BD: torch.Tensor, state: MixerState) -> NoReturn:
        raise InputError("bidirectional attention sees later tokens too and has no step; take a causal mixer to decode")

    def initial_state(self, batch: int) -> NoState:
        return NoState()
