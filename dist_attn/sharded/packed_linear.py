"""Linear attention inside packed documents that are cut across ranks: states go where a document goes on.

A rank hears only from ranks that hold parts of its first or last document. Where each document lies on one rank, no
rank sends anything. What documents start where is known to all ranks from the layout and does not travel.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from dist_attn.comm import Communicator
from dist_attn.layout import SequenceLayout
from dist_attn.ops import Denominator, FeatureMap, LinearState, absorb_keys, linear_attention
from dist_attn.ops.linear_attention import Implementation, check_choice, state_dtype
from dist_attn.ops.linear_attention.streaming import check_shapes
from dist_attn.sharded.carry_scan import for_two_uses
from dist_attn.sharded.document_exchange import Heard, hear_from_start
from dist_attn.sharded.prefix_scan.state_message import pack, unpack

__all__ = ["ranks_heard", "sharded_packed_linear_attention"]


def sharded_packed_linear_attention(
    comm: Communicator,
    layout: SequenceLayout,
    q_BHLK: torch.Tensor,
    k_BHLK: torch.Tensor,
    v_BHLV: torch.Tensor,
    *,
    feature_map: FeatureMap | None = None,
    log_gate_BHS: torch.Tensor | None = None,
    key_scale_BHS: torch.Tensor | None = None,
    causal: bool = True,
    state: LinearState | None = None,
    denominator: Denominator | None = None,
    implementation: Implementation = "auto",
) -> tuple[torch.Tensor, LinearState]:
    """`ops.linear_attention` with documents on this rank's slice; queries and keys lie on the same layout.

    `state` is the one before the first global token. Who gives one gets the state after the last global token on every
    rank. Without, the state returned is the one after this rank's last token: the global one would have to travel to
    ranks that hold nothing of the last document, also where no document crosses a cut. `implementation` computes on
    each rank; kernels by name take causal attention only, whatever documents a rank has.

    Shapes: as `ops.linear_attention`, L local; may be 0.
    Cost: per rank that hears from this one a message of 4 B H (M (V + 1) + 2) bytes (8 in place of 4 for float64; two
        when not causal); backward the same the other way. No document over a cut and no state: nothing.
    """
    check_shapes(q_BHLK, k_BHLK, v_BHLV, log_gate_BHS, key_scale_BHS)
    dtype = state_dtype(q_BHLK, k_BHLK, v_BHLV, state=state)
    k, v = (for_two_uses(t, dtype) for t in (k_BHLK, v_BHLV))
    check_choice(
        implementation, q_BHLK, k, v, feature_map=feature_map, causal=causal, state=state, documents=True, sums=dtype
    )
    gates = (log_gate_BHS, key_scale_BHS)
    part = _Part(comm.rank, layout, q_BHLK, k, v, *gates, feature_map, denominator, dtype, implementation)
    tail = part.absorb(0, part.length)
    message, first = pack(tail), tail
    if not causal:
        first = part.absorb(0, part.first) if part.starts else tail
        message = torch.cat([message, pack(first)], dim=-1)
    running = hear_from_start(comm, ranks_heard(layout, causal=causal, final=state is not None), message, label="carry")
    rest = [] if not part.starts else part.attend_rest(causal)
    elements = _Elements(layout, running(), tail, first, comm.rank)
    before = elements.before(state)
    if causal:
        out = part.attend_first(before)
    else:
        out = part.read(0, part.first, elements.whole_first(before))
        if part.starts and layout.ranks_after(comm.rank):
            rest.append(part.read(part.starts[-1], part.length, elements.whole_last()))
    out = torch.cat([out, *rest], dim=2).to(v_BHLV.dtype)
    return out, before.combine(tail) if state is None else elements.final(state)


def ranks_heard(layout: SequenceLayout, *, causal: bool, final: bool) -> list[tuple[int, ...]]:
    """Which ranks each rank hears from: of its first document, of its last one unless `causal`, of the `final` one."""
    last = layout.ranks_of_last_document() if final else ()
    heard = (
        {*layout.ranks_before(rank), *(() if causal else layout.ranks_after(rank)), *last} - {rank}
        for rank in range(layout.size)
    )
    return [tuple(sorted(ranks)) for ranks in heard]


@dataclass(frozen=True)
class _Part:
    """This rank's slice: the tokens before its first document start, and the documents from there on."""

    rank: int
    layout: SequenceLayout
    q_BHLK: torch.Tensor
    k_BHLK: torch.Tensor
    v_BHLV: torch.Tensor
    log_gate_BHL: torch.Tensor | None
    key_scale_BHL: torch.Tensor | None
    feature_map: FeatureMap | None
    denominator: Denominator | None
    dtype: torch.dtype
    implementation: Implementation

    @property
    def length(self) -> int:
        return self.v_BHLV.shape[2]

    @property
    def starts(self) -> tuple[int, ...]:
        return self.layout.documents_on(self.rank)

    @property
    def first(self) -> int:
        """How many tokens lie before the first start."""
        return self.starts[0] if self.starts else self.length

    def absorb(self, start: int, stop: int) -> LinearState:
        """What the keys of some tokens leave behind, of the last document among them."""
        return absorb_keys(
            self.k_BHLK[:, :, start:stop],
            self.v_BHLV[:, :, start:stop],
            feature_map=self.feature_map,
            log_gate_BHS=_cut(self.log_gate_BHL, start, stop),
            key_scale_BHS=_cut(self.key_scale_BHL, start, stop),
            dtype=self.dtype,
            documents=tuple(t - start for t in self.starts if start <= t < stop),
            implementation=self._by(start, stop),
        )

    def attend_first(self, before: LinearState) -> torch.Tensor:
        """Causal outputs of the tokens before the first start."""
        return self._attend(0, self.first, True, before)

    def attend_rest(self, causal: bool) -> list[torch.Tensor]:
        """Outputs of the documents that start here, but for the last one where it takes keys of later ranks."""
        waits = not causal and bool(self.layout.ranks_after(self.rank))
        return [self._attend(self.first, self.starts[-1] if waits else self.length, causal, None)]

    def read(self, start: int, stop: int, state: LinearState) -> torch.Tensor:
        """Outputs of queries that all read the same state."""
        nothing_K, nothing_V = self.k_BHLK[:, :, :0], self.v_BHLV[:, :, :0]
        out, _ = linear_attention(
            self.q_BHLK[:, :, start:stop],
            nothing_K,
            nothing_V,
            feature_map=self.feature_map,
            causal=False,
            state=state,
            denominator=self.denominator,
            implementation=self._by(start, stop),
        )
        return out

    def _attend(self, start: int, stop: int, causal: bool, state: LinearState | None) -> torch.Tensor:
        out, _ = linear_attention(
            self.q_BHLK[:, :, start:stop],
            self.k_BHLK[:, :, start:stop],
            self.v_BHLV[:, :, start:stop],
            feature_map=self.feature_map,
            log_gate_BHS=_cut(self.log_gate_BHL, start, stop),
            key_scale_BHS=_cut(self.key_scale_BHL, start, stop),
            causal=causal,
            state=state,
            denominator=self.denominator,
            documents=tuple(t - start for t in self.starts if start <= t < stop),
            implementation=self._by(start, stop),
        )
        return out

    def _by(self, start: int, stop: int) -> Implementation:
        """What computes over these tokens, once checked: kernels take no empty slice."""
        return self.implementation if start < stop else "streaming"


@dataclass(frozen=True)
class _Elements:
    """What each rank that was heard of has left behind: after its last token, and after its first document."""

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
        tail = unpack(row, self.tail)
        starts = bool(self.layout.documents_on(rank))
        return replace(tail, reset_BH=torch.full_like(tail.reset_BH, starts))

    def _first_of(self, rank: int) -> LinearState:
        return unpack(self.heard.messages[rank][..., self._columns :], self.tail)

    @property
    def _columns(self) -> int:
        features, values = self.tail.s_BHMV.shape[2:]
        return features * (values + 1) + 2

    def _nothing(self) -> LinearState:
        return LinearState(*(torch.zeros_like(t) for t in self.tail.tensors()))


def _cut(tensor: torch.Tensor | None, start: int, stop: int) -> torch.Tensor | None:
    return None if tensor is None else tensor[:, :, start:stop]
