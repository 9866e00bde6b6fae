"""Linear attention over layouts: which of its forms a call takes, also where queries and keys are cut differently.

Query i sees keys up to i, so queries with a key of their own go to where it lies and attend there, and their outputs
come back; queries behind the last key read the state after all keys, which every rank has.
"""

from dataclasses import dataclass, replace
from functools import partial

import torch

from dist_attn.comm import Communicator
from dist_attn.layout import SequenceLayout
from dist_attn.ops import LinearState
from dist_attn.ops.linear_attention import Attend, LinearCall, prefix_then_causal
from dist_attn.sharded.call_checks import CallChecks
from dist_attn.sharded.carry_scan import sharded_linear_attention
from dist_attn.sharded.in_order import attention_in_order
from dist_attn.sharded.packed_linear import sharded_packed_linear_attention
from dist_attn.sharded.prefix_scan import Exchange
from dist_attn.sharded.realignment import realign_tokens


def attend_over_layouts(checks: CallChecks, exchange: Exchange, call: LinearCall) -> tuple[torch.Tensor, LinearState]:
    """`ops.linear_attention` of this rank's slices of the layouts of `checks`, whose documents the call leaves out.

    States travel by `exchange`; a prefix counts global tokens.
    """
    comm, layout, memory = checks.comm, checks.layout, checks.memory
    attend: Attend
    if checks.packed:
        checks.refuse_memory("linear_attention")
        checks.refuse_deterministic("linear attention over packed documents")
        attend = partial(sharded_packed_linear_attention, comm, layout)
    elif checks.deterministic:
        attend = partial(attention_in_order, comm)
    else:
        attend = partial(sharded_linear_attention, comm, exchange=exchange)
    if call.causal and memory != layout:
        checks.refuse_deterministic("causal attention over keys on a layout of their own")
        attend = _OverTwoLayouts.behind(call.prefix, comm, layout, memory, attend)
    if call.prefix:
        checks.refuse_deterministic("a prefix that attends to itself in full")
        here, there = (max(0, call.prefix - part.range(comm.rank)[0]) for part in (layout, memory))
        return prefix_then_causal(attend, call, here, there)
    return attend(call)


@dataclass(frozen=True)
class _OverTwoLayouts:
    """`attend` for queries on `layout` and keys on `memory`, the same result as on one rank; L != S is allowed.

    `attend` is linear attention over ranks, for as many queries as keys where causal.

    Cost: that of `attend` and, where causal, two all-to-alls: of the queries that change ranks, and of their outputs.
    """

    comm: Communicator
    layout: SequenceLayout
    memory: SequenceLayout
    attend: Attend

    @staticmethod
    def behind(
        prefix: int, comm: Communicator, layout: SequenceLayout, memory: SequenceLayout, attend: Attend
    ) -> "_OverTwoLayouts":
        """For causal calls of what lies behind a prefix of global tokens."""
        queries, keys = (SequenceLayout(tuple(max(0, cut - prefix) for cut in part.cuts)) for part in (layout, memory))
        return _OverTwoLayouts(comm, queries, keys, attend)

    def __call__(self, call: LinearCall) -> tuple[torch.Tensor, LinearState]:
        if not call.causal:
            return self.attend(call)
        near_BHSK = realign_tokens(self.comm, self.layout, self.memory, call.q_BHLK, label="queries")
        near = near_BHSK.shape[2]
        # Where queries end before keys do, others stand in; ones, because a vector of zeros has no direction.
        spare_BHSK = near_BHSK.new_ones((*near_BHSK.shape[:2], call.keys - near, near_BHSK.shape[3]))
        out_BHSV, after = self.attend(replace(call, q_BHLK=torch.cat([near_BHSK, spare_BHSK], dim=2)))
        common = SequenceLayout(tuple(min(cut, self.layout.total) for cut in self.memory.cuts))
        back_BHLV = realign_tokens(self.comm, common, self.layout, out_BHSV[:, :, :near], label="outputs")
        far = call.part(slice(back_BHLV.shape[2], None), slice(0))
        far_BHLV, _ = self.attend(replace(far, causal=False, state=after))
        return torch.cat([back_BHLV, far_BHLV], dim=2), after
