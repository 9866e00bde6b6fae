"""Causal kernel attention with Shaw's relative positions (Scaleformer); its state has constant size."""

from dataclasses import dataclass
from typing import final

import torch
from torch import nn

from dist_attn.feature_maps import elu_plus_one
from dist_attn.mixers.base import MixerState, Paradigm, TokenMixer, require_own
from dist_attn.mixers.heads import merge_heads, split_heads
from dist_attn.mixers.narrow_layers import empty_output
from dist_attn.model_config.mixers.attention import ScaleformerConfig
from dist_attn.ops import RelativeState, SequenceOps, relative_attention_step
from dist_attn.ops.relative_attention import WindowState, relative_attention_streaming


@dataclass(frozen=True)
class ScaleformerState:
    """The kernel state, the sum of the values that left the window, and the values still in it."""

    attention: RelativeState

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors in a fixed order."""
        return (self.attention.sz_BHMW, self.attention.window.far_BHW, self.attention.window.near_BHTW)

    def replace(self, tensors: tuple[torch.Tensor, ...]) -> "ScaleformerState":
        """Return a state of the same kind over other tensors."""
        sz_BHMW, far_BHW, near_BHTW = tensors
        return ScaleformerState(RelativeState(sz_BHMW, WindowState(far_BHW, near_BHTW, self.attention.window.length)))


@final
class ScaleformerAttention(TokenMixer):
    """Multi-head attention with scores phi(q).phi(k) + phi(q).phi(rp), phi = elu + 1, in O(L).

    Reference: Scaleformer, Eq. 9 to 11 with a mask.
    """

    paradigm = Paradigm.LEARNED_DEPENDENT

    def __init__(self, config: ScaleformerConfig) -> None:
        super().__init__()
        self.config = config
        self.qkv = nn.Linear(config.hidden_size, sum(config.qkv_sizes), bias=False)
        self.out = nn.Linear(config.qkv_sizes[2], config.hidden_size, bias=False)
        # Rows for keys 0 to `reach` tokens back, the furthest first; the rows of later keys are never seen.
        self.positions_HRK = nn.Parameter(0.02 * torch.randn(config.num_heads, config.reach + 1, config.head_size))

    def forward(
        self, x_BLD: torch.Tensor, ops: SequenceOps, state: MixerState | None = None
    ) -> tuple[torch.Tensor, ScaleformerState]:
        before = self._own(state, x_BLD.shape[0])
        q, k, v = (split_heads(t, self.config.num_heads) for t in self.qkv(x_BLD).split(self.config.qkv_sizes, dim=-1))
        out_BHLV, after = relative_attention_streaming(
            elu_plus_one(q), elu_plus_one(k), v, self._rows(), before.attention, ops=ops
        )
        return self.out(merge_heads(out_BHLV)), ScaleformerState(after)

    def step(self, x_BD: torch.Tensor, state: MixerState) -> tuple[torch.Tensor, ScaleformerState]:
        before = self._own(state, x_BD.shape[0])
        q, k, v = (
            t.unflatten(-1, (self.config.num_heads, -1)) for t in self.qkv(x_BD).split(self.config.qkv_sizes, dim=-1)
        )
        out_BHV, after = relative_attention_step(elu_plus_one(q), elu_plus_one(k), v, self._rows(), before.attention)
        return self.out(out_BHV.flatten(1)), ScaleformerState(after)

    def initial_state(self, batch: int) -> ScaleformerState:
        config, like = self.config, empty_output(self.qkv)
        dtype = torch.promote_types(like.dtype, torch.float32)
        sizes = (batch, config.num_heads, config.head_size, config.value_size, config.reach)
        return ScaleformerState(RelativeState.identity(*sizes, dtype=dtype, device=like.device))

    def _rows(self) -> torch.Tensor:
        """phi of the positions, [H, 2 reach + 1, K]: zeros for keys that a mask hides."""
        seen_HRK = elu_plus_one(self.positions_HRK)
        return nn.functional.pad(seen_HRK, (0, 0, 0, self.config.reach))

    def _own(self, state: MixerState | None, batch: int) -> ScaleformerState:
        if state is None:
            return self.initial_state(batch)
        config, heads = self.config, (batch, self.config.num_heads)
        columns = config.value_size + 1  # the values and a one
        shapes = [
            (*heads, config.head_size, columns),
            (*heads, columns),
            (*heads, max(0, config.reach - 1), columns),
        ]
        return require_own(state, ScaleformerState, config.kind, shapes)
