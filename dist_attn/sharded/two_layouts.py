"""Causal linear attention whose queries and keys are cut differently: queries go to where their keys are, outputs back.

Query i sees keys up to i, so those with a key of their own attend where it lies; queries behind the last key read the
state after all keys, which every rank has.
"""

from dataclasses import dataclass

import torch

from dist_attn.comm import Communicator
from dist_attn.layout import SequenceLayout
from dist_attn.ops import LinearState
from dist_attn.ops.linear_attention.prefix import Attend
from dist_attn.sharded.realignment import realign_tokens

__all__ = ["over_two_layouts"]


def over_two_layouts(
    comm: Communicator, layout: SequenceLayout, memory: SequenceLayout, attend: Attend, *, prefix: int = 0
) -> Attend:
    """`attend` for queries on `layout` and keys on `memory`, the same result as on one rank; L != S is allowed.

    `attend` is linear attention over ranks with everything else settled, for as many queries as keys where causal.
    Causal calls are given what lies behind a `prefix` of global tokens.

    Cost: that of `attend` and, where causal, two all-to-alls: of the queries that change ranks, and of their outputs.
    """
    queries, keys = (SequenceLayout(tuple(max(0, cut - prefix) for cut in part.cuts)) for part in (layout, memory))
    return _OverTwoLayouts(comm, queries, keys, attend)


@dataclass(frozen=True)
class _OverTwoLayouts:
    comm: Communicator
    layout: SequenceLayout
    memory: SequenceLayout
    attend: Attend

    def __call__(
        self,
        q_BHLK: torch.Tensor,
        k_BHSK: torch.Tensor,
        v_BHSV: torch.Tensor,
        *,
        log_gate_BHS: torch.Tensor | None,
        key_scale_BHS: torch.Tensor | None,
        causal: bool,
        state: LinearState | None,
    ) -> tuple[torch.Tensor, LinearState]:
        gates = {"log_gate_BHS": log_gate_BHS, "key_scale_BHS": key_scale_BHS}
        if not causal:
            return self.attend(q_BHLK, k_BHSK, v_BHSV, causal=False, state=state, **gates)
        near_BHSK = realign_tokens(self.comm, self.layout, self.memory, q_BHLK, label="queries")
        near = near_BHSK.shape[2]
        # Where queries end before keys do, others stand in; ones, because a vector of zeros has no direction.
        spare_BHSK = near_BHSK.new_ones((*near_BHSK.shape[:2], k_BHSK.shape[2] - near, near_BHSK.shape[3]))
        queries_BHSK = torch.cat([near_BHSK, spare_BHSK], dim=2)
        out_BHSV, after = self.attend(queries_BHSK, k_BHSK, v_BHSV, causal=True, state=state, **gates)
        common = SequenceLayout(tuple(min(cut, self.layout.total) for cut in self.memory.cuts))
        back_BHLV = realign_tokens(self.comm, common, self.layout, out_BHSV[:, :, :near], label="outputs")
        far_BHLV, _ = self.attend(
            q_BHLK[:, :, back_BHLV.shape[2] :],
            k_BHSK[:, :, :0],
            v_BHSV[:, :, :0],
            log_gate_BHS=None if log_gate_BHS is None else log_gate_BHS[:, :, :0],
            key_scale_BHS=None if key_scale_BHS is None else key_scale_BHS[:, :, :0],
            causal=False,
            state=after,
        )
        return torch.cat([back_BHLV, far_BHLV], dim=2), after
