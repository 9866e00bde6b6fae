"""Linear attention over layouts: which of its forms a call takes, other cuts of queries and keys, the bits of one rank.

Query i sees keys up to i, so queries with a key of their own go to where it lies and attend there, and their outputs
come back; queries behind the last key read the state after all keys, which every rank has.

A fold over the totals of ranks differs from one rank's fold over chunks by roundings; strong gates hide that, weak ones
do not. For the bits of one rank the state itself goes from rank to rank, every chunk is computed from it, and cuts lie
between chunks: the arithmetic is the same for any number of ranks, one included.
"""

from dataclasses import dataclass, replace
from functools import partial

import torch

from dist_attn.comm import Communicator
from dist_attn.layout import SequenceLayout
from dist_attn.ops import LinearState
from dist_attn.ops.linear_attention import Attend, LinearCall, absorb, check_choice, prefix_then_causal
from dist_attn.ops.linear_attention.attention import absorb_by_chunks, attend_by_chunks, read_by_chunks
from dist_attn.sharded.carry_scan import sharded_linear_attention
from dist_attn.sharded.in_turn import in_turn
from dist_attn.sharded.packed_linear import sharded_packed_linear_attention
from dist_attn.sharded.prefix_scan.exchanges import tied
from dist_attn.sharded.redistribution import realign_tokens
from dist_attn.sharded.sharding import Sharding


def attend_over_layouts(sharding: Sharding, call: LinearCall) -> tuple[torch.Tensor, LinearState]:
    """`ops.linear_attention` of this rank's slices, whose documents are the layout's; a prefix counts global tokens."""
    comm, layout, memory = sharding.comm, sharding.layout, sharding.memory
    attend: Attend
    if sharding.packed:
        sharding.refuse_memory("linear_attention")
        sharding.refuse_deterministic("linear attention over packed documents")
        attend = partial(sharded_packed_linear_attention, comm, layout)
    elif sharding.deterministic:
        attend = partial(attention_in_order, comm)
    else:
        attend = partial(sharded_linear_attention, comm, exchange=sharding.exchange)
    if call.causal and memory != layout:
        sharding.refuse_deterministic("causal attention over keys on a layout of their own")
        attend = _OverTwoLayouts.behind(call.prefix, comm, layout, memory, attend)
    if call.prefix:
        sharding.refuse_deterministic("a prefix that attends to itself in full")
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


def attention_in_order(comm: Communicator, call: LinearCall) -> tuple[torch.Tensor, LinearState]:
    """`sharded_linear_attention` whose outputs and states do not depend on the number of ranks, bit for bit.

    The gradients of q, k, v, gates and key scales do not either; those of what all ranks share (feature map, state in)
    are sums over the ranks' shares, which round by their number. The call's implementation computes each chunk.

    Cost: |x| = 4 B H (M (V + 1) + 2) bytes to the next rank and, from the last one, to all: P - 1 steps that wait for
        each other. Without gradients a rank walks its keys, sends, and attends while the others walk; with gradients
        the ranks attend one after the other.
    """
    dtype = call.sums_dtype()
    check_choice(call, sums=dtype)
    # No keys yet: the state before all, in the precision of the sums. It depends on every input, so that a rank without
    # tokens has gradients too.
    no_keys = call.part(slice(0), slice(0)).of_keys().streaming_if_empty()
    first = absorb(no_keys, dtype)
    message_BHX, heads = first.pack(), max(1, first.mass_BH.shape[1])

    def attend(_: slice, before_BHX: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, after = attend_by_chunks(call, first.unpack(before_BHX))
        return out, after.pack()

    def walk_keys(_: slice, before_BHX: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, absorb_by_chunks(call, first.unpack(before_BHX)).pack()

    if call.causal and torch.is_grad_enabled():
        _, out_BHLV, after_BHX = in_turn(comm, message_BHX, heads, attend)
        assert out_BHLV is not None  # `attend` returns one
        return out_BHLV, first.unpack(after_BHX)
    before_BHX, _, after_BHX = in_turn(comm, message_BHX, heads, walk_keys)
    after = first.unpack(after_BHX)
    if call.causal:
        return attend_by_chunks(call, first.unpack(before_BHX))[0], after
    out_BHLV = read_by_chunks(call, after)
    return tied(out_BHLV, after.s_BHMV), after  # without queries nothing else leads back to the exchanges
