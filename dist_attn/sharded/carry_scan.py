"""Linear attention over a sequence that is cut across ranks: one exclusive scan of carries.

Each rank reduces its own keys to a state, the ranks scan these states (their size does not depend on the length), and
each adds what came before its first token. Local work lies between the launch of the scan and its wait, forward and
backward; the backward pass is the transposed scan. Two ways, the same result to rounding:

    one_walk   one walk takes sums from nothing and gives the state; a walk over the queries completes them, as far as
               gates leave something of the state before. Tokens behind that attend by themselves at once.
    two_walks  a walk over all keys gives the state; while the states travel, the first tokens' sums are taken from
               nothing and completed when they have arrived; the others attend in line, from the state before them.

One walk holds the sums of the tokens that it completes, V + 2 numbers per token and head. With gates that forget it is
one walk and no more. Without, it was 4 to 15 % faster in the streaming form; by C kernels, which make features so fast
that memory counts, two walks are, and `TwoWalks` takes them with a backward pass of one.

Ranks need not walk alike: both ways exchange the same.
"""

from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Literal

import torch

from dist_attn.comm import Communicator
from dist_attn.comm import differentiable as collectives
from dist_attn.errors import ShapeError
from dist_attn.ops import Denominator, FeatureMap, LinearState, absorb_keys, linear_attention
from dist_attn.ops.linear_attention import (
    Implementation,
    PartedSequence,
    Rooms,
    TwoWalks,
    check_choice,
    check_shapes,
    choose,
    complete_sums,
    local_sums,
    state_dtype,
    tokens_until_forgotten,
)
from dist_attn.sharded.prefix_scan import Exchange, exclusive_scan, exclusive_scan_start

__all__ = ["LOCAL_PASS", "Walks", "for_two_uses", "sharded_linear_attention"]

Walks = Literal["one_walk", "two_walks"]

LOCAL_PASS = "local pass"  # in the traffic log
# So many tokens are attended while the states travel. On a CPU none: a state takes a millisecond, and to complete sums
# takes longer.
OVERLAP_TOKENS = {"cpu": 0, "cuda": 1024}


def sharded_linear_attention(
    comm: Communicator,
    q_BHLK: torch.Tensor,
    k_BHSK: torch.Tensor,
    v_BHSV: torch.Tensor,
    *,
    feature_map: FeatureMap | None = None,
    log_gate_BHS: torch.Tensor | None = None,
    key_scale_BHS: torch.Tensor | None = None,
    causal: bool = True,
    state: LinearState | None = None,
    denominator: Denominator | None = None,
    exchange: Exchange | None = None,
    walks: Walks | None = None,
    implementation: Implementation = "auto",
) -> tuple[torch.Tensor, LinearState]:
    """`ops.linear_attention` on this rank's slice of queries and keys.

    `state` is the one before the first global token, equal on all ranks; the state returned is the global final one,
    on every rank. Gradients of replicated inputs are this rank's share. `walks` is how the local work is cut (None: as
    is faster) and `implementation` what does it, as for `ops.linear_attention`; an empty slice has no use for kernels.

    Shapes: as `ops.linear_attention` with L and S local; either may be 0, causal they are equal.
    Cost: one exchange of 4 B H (M (V + 1) + 2) bytes per rank (8 in place of 4 for float64) as in `exclusive_scan`,
        its transpose backward. One rank alone: nothing.
    Raises: ShapeError when shapes do not fit together; ConfigError, on ranks without tokens too, for an implementation
        that cannot take this call.
    Reference: Random Feature Attention, Eq. 6 and 7, as a scan over (log a, S, z).
    """
    check_shapes(q_BHLK, k_BHSK, v_BHSV, log_gate_BHS, key_scale_BHS)
    segment = _Segment(
        feature_map, log_gate_BHS, key_scale_BHS, state_dtype(q_BHLK, k_BHSK, v_BHSV, state=state), implementation
    )
    if comm.size == 1:
        return linear_attention(
            q_BHLK,
            k_BHSK,
            v_BHSV,
            feature_map=feature_map,
            log_gate_BHS=log_gate_BHS,
            key_scale_BHS=key_scale_BHS,
            causal=causal,
            state=state,
            denominator=denominator,
            implementation=implementation,
        )
    if not causal:
        segment.check_choice(q_BHLK, k_BHSK, v_BHSV, state)
        # Every query reads the state after the last key of all ranks; there is nothing left to absorb.
        _, after = exclusive_scan(comm, segment.absorb(k_BHSK, v_BHSV), state, exchange)
        no_keys = k_BHSK[:, :, :0], v_BHSV[:, :, :0]
        out_BHLV, _ = linear_attention(
            q_BHLK,
            *no_keys,
            feature_map=feature_map,
            causal=False,
            state=after,
            denominator=denominator,
            implementation=segment.by(q_BHLK),
        )
        return out_BHLV, after
    if q_BHLK.shape[2] != k_BHSK.shape[2]:
        raise ShapeError(
            f"causal attention over ranks needs as many queries as keys on a rank; rank {comm.rank} has "
            f"{q_BHLK.shape[2]} and {k_BHSK.shape[2]}"
        )
    q_BHLK, k_BHSK, values_BHSV = (for_two_uses(x, segment.dtype) for x in (q_BHLK, k_BHSK, v_BHSV))
    segment.check_choice(q_BHLK, k_BHSK, values_BHSV, state)
    if walks is None:
        walks = segment.faster_walks(q_BHLK, k_BHSK, values_BHSV)
    attend = segment.attend_in_one_walk if walks == "one_walk" else segment.attend_in_two_walks
    out_BHLV, after = attend(comm, q_BHLK, k_BHSK, values_BHSV, state, denominator, exchange)
    return out_BHLV.to(v_BHSV.dtype), after


def for_two_uses(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`x` such that the gradients of its two uses are added before they are rounded to half precision, not after.

    Rounded apart they were a quarter worse than on one rank. Without a gradient the blocks are widened one by one.
    """
    return x.to(dtype) if x.requires_grad and torch.is_grad_enabled() else x


@dataclass(frozen=True)
class _Segment:
    """This rank's part of a causal pass: what applies to its keys, and the precision that one rank alone sums in."""

    feature_map: FeatureMap | None
    log_gate_BHS: torch.Tensor | None
    key_scale_BHS: torch.Tensor | None
    dtype: torch.dtype
    implementation: Implementation

    def check_choice(
        self, q_BHLK: torch.Tensor, k_BHSK: torch.Tensor, v_BHSV: torch.Tensor, state: LinearState | None
    ) -> None:
        """Raises ConfigError where the implementation cannot take this call, on ranks without tokens too."""
        check_choice(
            self.implementation, q_BHLK, k_BHSK, v_BHSV, feature_map=self.feature_map, state=state, sums=self.dtype
        )

    def by(self, x_BHLK: torch.Tensor) -> Implementation:
        """What computes over these tokens, once checked: kernels take no empty slice, which must not be refused so."""
        return self.implementation if x_BHLK.shape[2] else "streaming"

    def faster_walks(self, q_BHLK: torch.Tensor, k_BHLK: torch.Tensor, v_BHLV: torch.Tensor) -> Walks:
        """Two where C kernels attend without gates, one otherwise."""
        return "two_walks" if self._natively_ungated(q_BHLK, k_BHLK, v_BHLV) else "one_walk"

    def _natively_ungated(self, q_BHLK: torch.Tensor, k_BHLK: torch.Tensor, v_BHLV: torch.Tensor) -> bool:
        if self.log_gate_BHS is not None or not q_BHLK.shape[2]:
            return False
        choice = choose(self.implementation, q_BHLK, k_BHLK, v_BHLV, feature_map=self.feature_map, sums=self.dtype)
        return choice.implementation == "native"

    def absorb(
        self, k_BHSK: torch.Tensor, v_BHSV: torch.Tensor, start: int = 0, state: LinearState | None = None
    ) -> LinearState:
        """What the keys from `start` leave behind after `state`."""
        return absorb_keys(
            k_BHSK[:, :, start:],
            v_BHSV[:, :, start:],
            feature_map=self.feature_map,
            log_gate_BHS=_cut(self.log_gate_BHS, start),
            key_scale_BHS=_cut(self.key_scale_BHS, start),
            state=state,
            dtype=self.dtype,
            implementation=self.by(k_BHSK[:, :, start:]),
        )

    def _of_keys(self, state: LinearState, k_BHLK: torch.Tensor, v_BHLV: torch.Tensor) -> LinearState:
        """A state without a graph where nothing it depends on wants gradients.

        One that came with outputs has a graph where queries want them; ranks whose states do not would differ.
        """
        parameters = () if self.feature_map is None else self.feature_map.tensors()
        made_of = (k_BHLK, v_BHLV, self.log_gate_BHS, self.key_scale_BHS, *parameters)
        if any(t is not None and t.requires_grad for t in made_of):
            return state
        return LinearState(*(t.detach() for t in state.tensors()))

    def attend_in_two_walks(
        self,
        comm: Communicator,
        q_BHLK: torch.Tensor,
        k_BHLK: torch.Tensor,
        v_BHLV: torch.Tensor,
        state: LinearState | None,
        denominator: Denominator | None,
        exchange: Exchange | None,
    ) -> tuple[torch.Tensor, LinearState]:
        """Outputs and the global final state; the states travel while the first tokens' sums, if any, are taken."""
        tokens = k_BHLK.shape[2]
        first = min(_overlap(k_BHLK), tokens)
        if not first and self._natively_ungated(q_BHLK, k_BHLK, v_BHLV):
            walks = TwoWalks(
                q_BHLK,
                k_BHLK,
                v_BHLV,
                self.key_scale_BHS,
                feature_map=self.feature_map,
                denominator=Denominator() if denominator is None else denominator,
                attention=partial(linear_attention, implementation="streaming"),
                absorb=partial(absorb_keys, implementation="streaming"),
            )
            before, after = exclusive_scan(comm, self._of_keys(walks.behind, k_BHLK, v_BHLV), state, exchange)
            return walks.attend(before), after
        running = exclusive_scan_start(comm, self.absorb(k_BHLK, v_BHLV), state, exchange)
        parted = PartedSequence(q_BHLK, k_BHLK, v_BHLV, (first, tokens) if first < tokens else (tokens,))
        sums, first_state = self._sums(parted, 0, (0, first), None)
        sums = collectives.marked(comm, sums, LOCAL_PASS)
        before, after = running.wait()
        outputs = [self._complete(sums, parted.part(0)[0], before, denominator, v_BHLV.dtype, parted.rooms(0))]
        if first < tokens:
            state = before.combine(first_state)
            outputs.append(self._attend(parted, 1, (first, tokens), state, denominator)[0])
        return parted.join(outputs), after

    def attend_in_one_walk(
        self,
        comm: Communicator,
        q_BHLK: torch.Tensor,
        k_BHLK: torch.Tensor,
        v_BHLV: torch.Tensor,
        state: LinearState | None,
        denominator: Denominator | None,
        exchange: Exchange | None,
    ) -> tuple[torch.Tensor, LinearState]:
        """Outputs and the global final state; the states travel while the last tokens are worked on.

        Tokens up to `known` need the state before: their sums wait for it, those behind attend by themselves.
        """
        tokens = k_BHLK.shape[2]
        late = max(0, tokens - _overlap(k_BHLK))
        known = tokens_until_forgotten(self.log_gate_BHS, tokens)
        # Parts end at these; the states travel while those from `late` on are worked on.
        cuts = sorted({known, late, tokens} - {0}) or [0]
        parted = PartedSequence(q_BHLK, k_BHLK, v_BHLV, cuts)
        sums: list[torch.Tensor] = []
        outputs: list[torch.Tensor] = []
        own: LinearState | None = None
        running = None
        for number, (start, stop) in enumerate(pairwise((0, *cuts))):
            if start == late:
                element = self.absorb(k_BHLK, v_BHLV, late, own)
                running = exclusive_scan_start(comm, self._of_keys(element, k_BHLK, v_BHLV), state, exchange)
            if start < known or not tokens:
                part, own = self._sums(parted, number, (start, stop), own)
                sums.append(part)
            else:
                part, own = self._attend(parted, number, (start, stop), own, denominator)
                outputs.append(part)
        if running is None:
            assert own is not None  # there was a part
            running = exclusive_scan_start(comm, self._of_keys(own, k_BHLK, v_BHLV), state, exchange)
        sums[-1] = collectives.marked(comm, sums[-1], LOCAL_PASS)
        before, after = running.wait()
        if len(sums) == 1:
            first = self._complete(sums[0], parted.part(0)[0], before, denominator, v_BHLV.dtype, parted.rooms(0))
        else:
            q_BHTK = q_BHLK[:, :, :known]
            first = self._complete(torch.cat(sums, dim=2), q_BHTK, before, denominator, v_BHLV.dtype, None)
        return parted.join([first, *outputs]), after

    def _complete(
        self,
        sums_BHTX: torch.Tensor,
        q_BHTK: torch.Tensor,
        before: LinearState,
        denominator: Denominator | None,
        out_dtype: torch.dtype,
        rooms: Rooms | None,
    ) -> torch.Tensor:
        """Outputs of the first tokens. Room for gradients of their queries is for those who took the sums."""
        return complete_sums(
            sums_BHTX,
            q_BHTK,
            before,
            feature_map=self.feature_map,
            log_gate_BHL=_cut(self.log_gate_BHS, 0, q_BHTK.shape[2]),
            denominator=denominator,
            out_dtype=out_dtype,
            implementation=self.by(q_BHTK),
            rooms=None if rooms is None else Rooms(rooms.out),
        )

    def _attend(
        self,
        parted: PartedSequence,
        number: int,
        span: tuple[int, int],
        state: LinearState | None,
        denominator: Denominator | None,
    ) -> tuple[torch.Tensor, LinearState]:
        """Outputs of a part, the tokens of `span`, from the state before them, and the state after."""
        q_BHTK, k_BHTK, v_BHTV = parted.part(number)
        return linear_attention(
            q_BHTK,
            k_BHTK,
            v_BHTV,
            feature_map=self.feature_map,
            log_gate_BHS=_cut(self.log_gate_BHS, *span),
            key_scale_BHS=_cut(self.key_scale_BHS, *span),
            state=state,
            denominator=denominator,
            implementation=self.by(q_BHTK),
            rooms=parted.rooms(number),
        )

    def _sums(
        self, parted: PartedSequence, number: int, span: tuple[int, int], state: LinearState | None
    ) -> tuple[torch.Tensor, LinearState]:
        """Sums of a part, from nothing but `state`, and the state after."""
        q_BHTK, k_BHTK, v_BHTV = parted.part(number)
        return local_sums(
            q_BHTK,
            k_BHTK,
            v_BHTV,
            feature_map=self.feature_map,
            log_gate_BHL=_cut(self.log_gate_BHS, *span),
            key_scale_BHL=_cut(self.key_scale_BHS, *span),
            state=state,
            dtype=self.dtype,
            implementation=self.by(q_BHTK),
            rooms=parted.rooms(number),
        )


def _overlap(k_BHLK: torch.Tensor) -> int:
    return OVERLAP_TOKENS.get(k_BHLK.device.type, 0)


def _cut(x_BHS: torch.Tensor | None, start: int, stop: int | None = None) -> torch.Tensor | None:
    return None if x_BHS is None else x_BHS[:, :, start:stop]
