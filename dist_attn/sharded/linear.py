"""Linear attention over layouts: which of its forms a call takes, other cuts of queries and keys, the bits of one rank.

Query i sees keys up to i, so queries with a key of their own go to where it lies and attend there, and their outputs
come back; queries behind the last key read the state after all keys, which every rank has.

A fold over the totals of ranks differs from one rank's fold over chunks by roundings; strong gates hide that, weak ones
do not. For the bits of one rank the state itself goes from rank to rank, every chunk is computed from it, and cuts lie
between chunks: the arithmetic is the same for any number of ranks, one included. C kernels go through each head by
itself, so that without gradients ranks take turns at groups of heads and walk every token once.

Inside packed documents states go where a document goes on: a rank hears only from ranks that hold parts of its first or
last document. Where each document lies on one rank, no rank sends anything. What documents start where is known to all
ranks from the layout and does not travel.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial

import torch

from dist_attn.comm import Communicator
from dist_attn.layout import SequenceLayout
from dist_attn.ops import LinearState
from dist_attn.ops.linear_attention import (
    Attend,
    LinearCall,
    OutputBuffers,
    absorb,
    attend,
    check_choice,
    check_prefix,
    choose,
    prefix_then_causal,
)
from dist_attn.ops.linear_attention.attention import absorb_by_chunks, attend_by_chunks, read_by_chunks
from dist_attn.ops.linear_attention.implementation import why_not_native
from dist_attn.ops.parts import Whole
from dist_attn.sharded.carry_scan import sharded_linear_attention, widened_for_grad_accumulation
from dist_attn.sharded.document_exchange import Heard, hear_from_start, ranks_heard
from dist_attn.sharded.in_turn import heads_of_a_turn, in_turn
from dist_attn.sharded.prefix_scan.exchanges import tied
from dist_attn.sharded.redistribution import realign_tokens
from dist_attn.sharded.sharding import Sharding, over_ranks
from dist_attn.sharded.trials import try_linear


@over_ranks(LinearCall)
def attend_over_layouts(sharding: Sharding, call: LinearCall) -> tuple[torch.Tensor, LinearState]:
    """`ops.linear_attention` of this rank's slices, whose documents are the layout's; a prefix counts global tokens."""
    comm, layout, memory = sharding.comm, sharding.layout, sharding.memory
    check_prefix(call.prefix, causal=call.causal, documents=sharding.packed)
    attend: Attend
    if sharding.packed:
        sharding.refuse_memory("linear_attention")
        sharding.refuse_deterministic("linear attention over packed documents")
        attend = partial(sharded_packed_linear_attention, comm, layout)
    elif sharding.deterministic:
        attend = partial(attention_in_order, comm)
    else:
        attend = partial(_attend_without_documents, sharding)
    if call.causal and memory != layout:
        sharding.refuse_deterministic("causal attention over keys on a layout of their own")
        attend = _OverTwoLayouts.behind(call.prefix, comm, layout, memory, attend)
    if call.prefix:
        sharding.refuse_deterministic("a prefix that attends to itself in full")
        here, there = (max(0, call.prefix - part.range(comm.rank)[0]) for part in (layout, memory))
        return prefix_then_causal(attend, call, here, there)
    return attend(call)


def _attend_without_documents(sharding: Sharding, call: LinearCall) -> tuple[torch.Tensor, LinearState]:
    """In turn where C kernels walk tokens without gradients and that is faster, else by a scan.

    In bfloat16 in turn even if it is not: what comes next rounds outputs, and sums in the order of a scan would often
    round to another number. Gates that forget leave a scan little to complete: where the last state is waited for at
    once, two ranks scanned in 0.87 of the time.
    """
    comm, v_BHSV = sharding.comm, call.v_BHSV
    call.check()
    by_name = call.implementation not in ("auto", "native")
    half = v_BHSV.dtype == torch.bfloat16
    may_take_turns = call.causal and comm.size > 1 and not by_name and not torch.is_grad_enabled()
    may_take_turns &= half or call.log_gate_BHS is None or sharding.late is not None
    # As one token, so that ranks without any choose as the others do.
    if may_take_turns and why_not_native(call.one_token(), call.sums_dtype()) is None:
        batch, heads, _, values = v_BHSV.shape
        state = batch, heads, call.num_features(), values
        together = heads_of_a_turn(sharding, state, v_BHSV.device, erases=False, always=half)
        check_choice(call)  # before rank 0 is waited for
        kernels = comm.told_by_first("C kernels", lambda: choose(call.one_token()).implementation)
        if together is not None and kernels == "native":
            return attention_in_turn(sharding, call, together)
    return sharded_linear_attention(comm, call, exchange=sharding.exchange)


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
        """Make one for causal calls of what lies behind a prefix of global tokens."""
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
    if comm.size > 1:
        try_linear(comm, call, dtype, "full")
        if call.causal:
            try_linear(comm, call, dtype, "causal")
    first = _before_all(call, dtype)
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


def attention_in_turn(sharding: Sharding, call: LinearCall, together: int) -> tuple[torch.Tensor, LinearState]:
    """`attention_in_order` by C kernels, without gradients, for `together` heads after the other.

    These kernels go through tokens in steps of their own, and through each head by itself: from the state before, the
    bits are those of one rank where cuts lie at multiples of 64 tokens. Every token is walked once. Where the last
    state is waited for at once, every rank but the last first absorbs its keys of the first heads and sends that state:
    the next one begins earlier.

    Cost: |x| bytes in groups of heads to the next rank and, from the last one, to all.
    """
    edges = (*range(0, call.v_BHSV.shape[1], together), call.v_BHSV.shape[1])
    whole = Whole(call.v_BHSV, edges, dim=1)
    first = _before_all(call, torch.float32)

    def of_heads(some: slice, before_BHX: torch.Tensor) -> LinearCall:
        before = LinearState(*(t[:, some] for t in first.tensors())).unpack(before_BHX)
        buffers = OutputBuffers(whole.place(some.start // together))
        return replace(call.heads(some), state=before, buffers=buffers).streaming_if_empty()

    def attend_heads(some: slice, before_BHX: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, after = attend(of_heads(some, before_BHX))
        return out, after.pack()

    def absorb_heads(some: slice, before_BHX: torch.Tensor) -> torch.Tensor:
        return absorb(of_heads(some, before_BHX)).pack()

    _, out_BHLV, after_BHX = in_turn(
        sharding.comm,
        first.pack(),
        together,
        attend_heads,
        whole.join,
        absorb=absorb_heads if sharding.late is None else None,
        when_there=sharding.when_there,
    )
    assert out_BHLV is not None  # `attend_heads` returns outputs
    after = LinearState(*(torch.empty_like(t) for t in first.tensors()))  # in pieces of memory of their own

    def unpack() -> None:
        for t, value in zip(after.tensors(), first.unpack(after_BHX).tensors(), strict=True):
            t.copy_(value)

    sharding.when_there(unpack)
    return out_BHLV, after


def _before_all(call: LinearCall, dtype: torch.dtype) -> LinearState:
    """The state before the first key, in the precision of the sums.

    It depends on every input, so that a rank without tokens has gradients too.
    """
    return absorb(call.part(slice(0), slice(0)).of_keys().streaming_if_empty(), dtype)


def sharded_packed_linear_attention(
    comm: Communicator, layout: SequenceLayout, call: LinearCall
) -> tuple[torch.Tensor, LinearState]:
    """`ops.linear_attention` of the layout's documents on this rank's slice; queries and keys lie on the same layout.

    The call's state is the one before the first global token. If there is one, the state after the last global token
    is returned on every rank. Otherwise the one after this rank's last token is: the global one would have to travel to
    ranks that hold nothing of the last document, also where no document crosses a cut. Kernels by name take causal
    attention only, whatever documents a rank has.

    Shapes: as `ops.linear_attention`, L local; may be 0.
    Cost: per rank that hears from this one a message of 4 B H (M (V + 1) + 2) bytes (8 in place of 4 for float64; two
        when not causal); backward the same the other way. No document over a cut and no state: nothing.
    """
    state, dtype, out_dtype = call.state, call.sums_dtype(), call.v_BHSV.dtype
    k, v = (widened_for_grad_accumulation(t, dtype) for t in (call.k_BHSK, call.v_BHSV))
    call = replace(call, k_BHSK=k, v_BHSV=v, documents=layout.documents_on(comm.rank))
    call.check()
    # Ranks without a document start refuse what those with one do.
    check_choice(replace(call, documents=layout.documents or ()), sums=dtype)
    if comm.size > 1:
        try_linear(comm, replace(call, documents=()), dtype, "full")
        for documents in ((), (0,)) if call.causal else ():
            try_linear(comm, replace(call, documents=documents), dtype, "causal")
    part = _Part(layout, comm.rank, replace(call, state=None), dtype)
    tail = part.absorb(0, call.keys)
    message, first = tail.pack(), tail
    if not call.causal:
        first = part.absorb(0, part.first) if call.documents else tail
        message = torch.cat([message, first.pack()], dim=-1)
    sources = ranks_heard(layout, causal=call.causal, final=state is not None)
    running = hear_from_start(comm, sources, message, label="carry")
    rest = [] if not call.documents else part.attend_rest()
    elements = _Elements(layout, running(), tail, first, comm.rank)
    before = elements.before(state)
    if call.causal:
        out = part.attend(0, part.first, before)
    else:
        out = part.read(0, part.first, elements.whole_first(before))
        if call.documents and layout.ranks_after(comm.rank):
            rest.append(part.read(call.documents[-1], call.keys, elements.whole_last()))
    out = torch.cat([out, *rest], dim=2).to(out_dtype)
    return out, before.combine(tail) if state is None else elements.final(state)


@dataclass(frozen=True)
class _Part:
    """This rank's slice: the tokens before its first document start, and the documents from there on."""

    layout: SequenceLayout
    rank: int
    call: LinearCall  # from nothing
    dtype: torch.dtype

    @property
    def first(self) -> int:
        """The number of tokens before the first start."""
        return self.call.documents[0] if self.call.documents else self.call.keys

    def absorb(self, start: int, stop: int) -> LinearState:
        """The state that the keys of some tokens leave, of the last document among them."""
        return absorb(self.call.tokens(start, stop).streaming_if_empty(), self.dtype)

    def attend_rest(self) -> list[torch.Tensor]:
        """Outputs of the documents that start here, but for the last one where it takes keys of later ranks."""
        waits = not self.call.causal and bool(self.layout.ranks_after(self.rank))
        return [self.attend(self.first, self.call.documents[-1] if waits else self.call.keys, None)]

    def attend(self, start: int, stop: int, state: LinearState | None) -> torch.Tensor:
        """Outputs of some tokens; `state` is that before the first of them."""
        return attend(replace(self.call.tokens(start, stop).streaming_if_empty(), state=state))[0]

    def read(self, start: int, stop: int, state: LinearState) -> torch.Tensor:
        """Outputs of queries that all read the same state."""
        return attend(self.call.tokens(start, stop).reading(state).streaming_if_empty())[0]


@dataclass(frozen=True)
class _Elements:
    """The states that each rank heard from has left: after its last token, and after its first document."""

    layout: SequenceLayout
    heard: Heard
    tail: LinearState
    first: LinearState
    rank: int

    def before(self, state: LinearState | None) -> LinearState:
        """The state before this rank's first token: of that token's document alone."""
        start, _ = self.layout.range(self.rank)
        continued = self.layout.document_of(start) == 0
        given = state if state is not None and continued else self._nothing()
        folded = LinearState.fold([given, *(self._tail_of(rank) for rank in self.layout.ranks_before(self.rank))])
        return replace(folded, s_BHMV=self.heard.connect(folded.s_BHMV))

    def whole_first(self, before: LinearState) -> LinearState:
        """The state after the whole document of this rank's first token."""
        later = () if self.layout.documents_on(self.rank) else self.layout.ranks_after(self.rank)
        return LinearState.fold([before, self.first, *(self._first_of(rank) for rank in later)])

    def whole_last(self) -> LinearState:
        """The state after the whole document of this rank's last token, which starts here."""
        return LinearState.fold([self.tail, *(self._first_of(rank) for rank in self.layout.ranks_after(self.rank))])

    def final(self, state: LinearState) -> LinearState:
        """The state after the last global token."""
        given = state if self.layout.document_of(self.layout.total - 1) == 0 else self._nothing()
        last: Iterable[int] = self.layout.ranks_of_last_document()
        folded = LinearState.fold([given, *(self._tail_of(r) if r != self.rank else self.tail for r in last)])
        return replace(folded, s_BHMV=self.heard.connect(folded.s_BHMV))

    def _tail_of(self, rank: int) -> LinearState:
        row = self.heard.messages[rank][..., : self._columns]
        tail = self.tail.unpack(row)
        starts = bool(self.layout.documents_on(rank))
        return replace(tail, reset_BH=torch.full_like(tail.reset_BH, starts))

    def _first_of(self, rank: int) -> LinearState:
        first = self.tail.unpack(self.heard.messages[rank][..., self._columns :])
        return replace(first, reset_BH=torch.zeros_like(first.reset_BH))

    @property
    def _columns(self) -> int:
        features, values = self.tail.s_BHMV.shape[2:]
        return features * (values + 1) + 2

    def _nothing(self) -> LinearState:
        return LinearState(*(torch.zeros_like(t) for t in self.tail.tensors()))
