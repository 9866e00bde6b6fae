"""Attention of a decoder's tokens over a memory, the encoder's tokens, which may be cut otherwise across ranks.

Letters: B batch, H heads, L queries on this rank, S keys, K head size, V values per head, D model width.
"""

import math
from dataclasses import dataclass

import torch
from torch import nn

from dist_attn.errors import InputError
from dist_attn.mixers.all_keys import KernelOverAllKeys, SoftmaxOverAllKeys, build_attention
from dist_attn.mixers.heads import RelativeRows, merge_heads, split_heads
from dist_attn.ops import LinearState, LocalSequenceOps, RelativePositions, SequenceOps
from dist_attn.ops.device import without_autocast
from dist_attn.ops.softmax_attention.tiled import sum_by_row
from dist_attn_papers.mixers.cross_config import CrossConfig
from dist_attn_papers.mixers.scaleformer import ScaleformerOverAllKeys
from dist_attn_papers.ops.taken_rows import take_by_row


@dataclass(frozen=True)
class MemoryState:
    """The state of the memory, as later queries need it.

    Of `scaleformer` and `softmax` it is all keys and values, or None where they are spread over ranks; of the others a
    state of constant size, equal on all ranks.
    """

    sums: LinearState | None
    kept: tuple[torch.Tensor, torch.Tensor] | None = None

    def select(self, index: list[int]) -> "MemoryState":
        """The memory of some of the sequences, in any order."""
        sums = None if self.sums is None else self.sums.select(index)
        return MemoryState(sums, None if self.kept is None else (self.kept[0][index], self.kept[1][index]))


class CrossAttention(nn.Module):
    """Multi-head attention over a memory; queries from the decoder, keys and values from the memory.

    Reference: Random Feature Attention, Algorithm 2; Scaleformer, Sec. 2.3 with L_Q != L_K.
    """

    def __init__(self, config: CrossConfig) -> None:
        super().__init__()
        self.config = config
        size, values = config.hidden_size, config.num_heads * config.value_size
        self.sizes = (size, values)
        self.q = nn.Linear(size, size, bias=False)
        self.kv = nn.Linear(size, sum(self.sizes), bias=False)
        self.out = nn.Linear(values, size, bias=False)
        self.attend = build_attention(config)

    def forward(
        self, x_BLD: torch.Tensor, memory_BSD: torch.Tensor, ops: SequenceOps
    ) -> tuple[torch.Tensor, MemoryState]:
        """The tokens' view of the memory, and what later tokens need of it.

        `ops` have the layout of x and, as memory layout, that of the memory.

        Shapes: x [B, L, D], memory [B, S, D] -> [B, L, D].
        Cost: across ranks, where the memory is a state, one exchange of 4 B H (M (V + 1) + 2) bytes per rank; of
            `efficient` a second one, of 4 B H (M + 3).
        """
        heads = self.config.num_heads
        k, v = (split_heads(t, heads) for t in self.kv(memory_BSD).split(self.sizes, dim=-1))
        out_BHLV, sums = self.attend(split_heads(self.q(x_BLD), heads), k, v, ops)
        kept = (k, v) if sums is None and ops.whole else None
        if sums is not None and not torch.is_grad_enabled():
            # Every later token reads all of it: faster in order than as a part of what the blocks carried.
            sums = LinearState(*(t.contiguous() for t in sums.tensors()))
        return self.out(merge_heads(out_BHLV)), MemoryState(sums, kept)

    def read(self, x_BLD: torch.Tensor, state: MemoryState, positions_BL: torch.Tensor) -> torch.Tensor:
        """`forward` for later tokens, at these positions, over a memory that was absorbed before: no exchange.

        Cost: O(1) per token in the length of the memory where it is a state, O(S) for the others.
        Raises: InputError where keys are needed and spread over ranks.
        """
        q_BHLK = split_heads(self.q(x_BLD), self.config.num_heads)
        match self.attend:
            case KernelOverAllKeys():
                assert state.sums is not None
                out_BHLV = self.attend.read(q_BHLK, state.sums)
            case _ if state.kept is None:
                raise InputError(
                    f"{self.config.attention} cross attention reads every key of the memory, which is spread over "
                    "ranks; decode on one rank, or take another kernel, whose memory is a state"
                )
            case ScaleformerOverAllKeys():
                rows_B1LS = self._rows(positions_BL, state.kept[0], self.config.reach)
                out_BHLV = self.attend.read(q_BHLK, *state.kept, rows_B1LS)
            case SoftmaxOverAllKeys(relative=RelativeRows() as relative):
                out_BHLV = self._read_relative(q_BHLK, *state.kept, positions_BL, relative())
            case _:
                out_BHLV, _ = self.attend(q_BHLK, *state.kept, LocalSequenceOps())
        out_BLD: torch.Tensor = self.out(merge_heads(out_BHLV))
        return out_BLD

    def _read_relative(
        self,
        q_BHLK: torch.Tensor,
        k_BHSK: torch.Tensor,
        v_BHSV: torch.Tensor,
        positions_BL: torch.Tensor,
        relative: RelativePositions,
    ) -> torch.Tensor:
        """Softmax with relative positions by definition: the host need not know where the queries stand."""
        wide = torch.promote_types(q_BHLK.dtype, torch.float32)
        rows_B1LS = self._rows(positions_BL, k_BHSK, relative.reach)
        with without_autocast(q_BHLK.device):
            q = q_BHLK.to(wide) / math.sqrt(q_BHLK.shape[3])
            near_BHLR = q @ relative.keys_HRK.to(wide).transpose(-1, -2)
            scores_BHLS = q @ k_BHSK.to(wide).transpose(-1, -2) + take_by_row(near_BHLR, rows_B1LS)
            weights_BHLS = scores_BHLS.softmax(dim=-1)
            out_BHLV = weights_BHLS @ v_BHSV.to(wide)
            if relative.values_HRV is not None:
                by_row_BHLR = sum_by_row(weights_BHLS, rows_B1LS, near_BHLR.shape[-1])
                out_BHLV = out_BHLV + by_row_BHLR @ relative.values_HRV.to(wide)
        return out_BHLV.to(v_BHSV.dtype)

    @staticmethod
    def _rows(positions_BL: torch.Tensor, k_BHSK: torch.Tensor, reach: int) -> torch.Tensor:
        """The row of each pair in a table of relative positions, [B, 1, L, S]."""
        keys_S = torch.arange(k_BHSK.shape[2], device=positions_BL.device)
        return ((keys_S - positions_BL[..., None]).clamp(-reach, reach) + reach)[:, None]
