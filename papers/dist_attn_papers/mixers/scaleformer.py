"""Kernel attention with Shaw's relative positions (Scaleformer), causal with a constant state and over all keys."""

from dataclasses import dataclass
from typing import final

import torch
from torch import nn

from dist_attn.feature_maps import elu_plus_one
from dist_attn.mixers.all_keys import AllKeys
from dist_attn.mixers.base import MixerState, Paradigm, TokenMixer, require_own
from dist_attn.mixers.heads import merge_heads, split_heads
from dist_attn.mixers.narrow_layers import empty_output
from dist_attn.model_config.mixers.attention import AttentionConfig
from dist_attn.ops import LinearState, SequenceOps
from dist_attn_papers.mixers.scaleformer_config import ScaleformerConfig
from dist_attn_papers.ops.relative_attention import (
    RelativeState,
    WindowState,
    relative_attention,
    relative_attention_step,
    relative_attention_streaming,
)
from dist_attn_papers.ops.taken_rows import take_by_row


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


@final
class ScaleformerOverAllKeys(AllKeys):
    """`ScaleformerAttention` over all keys.

    Reference: Scaleformer, Eq. 9 without a mask, and Sec. 2.3 with L_Q != L_K.
    """

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__(config)
        self.positions_HRK = nn.Parameter(0.02 * torch.randn(config.num_heads, 2 * config.reach + 1, config.head_size))

    def forward(
        self, q_BHLK: torch.Tensor, k_BHSK: torch.Tensor, v_BHSV: torch.Tensor, ops: SequenceOps
    ) -> tuple[torch.Tensor, LinearState | None]:
        phi_q, phi_k, phi_rp = (elu_plus_one(t) for t in (q_BHLK, k_BHSK, self.positions_HRK))
        return relative_attention(phi_q, phi_k, v_BHSV, phi_rp, causal=False, ops=ops), None

    def read(
        self, q_BHLK: torch.Tensor, k_BHSK: torch.Tensor, v_BHSV: torch.Tensor, rows_B1LS: torch.Tensor
    ) -> torch.Tensor:
        """The weights by definition, for queries that may stand anywhere: `rows` has the row of each pair."""
        phi_q, phi_k, phi_rp = (elu_plus_one(t) for t in (q_BHLK, k_BHSK, self.positions_HRK))
        scores_BHLS = phi_q @ phi_k.transpose(-1, -2)
        scores_BHLS = scores_BHLS + take_by_row(phi_q @ phi_rp.transpose(-1, -2), rows_B1LS)
        return scores_BHLS @ v_BHSV / scores_BHLS.sum(-1, keepdim=True)
