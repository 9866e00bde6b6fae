"""Linear attention over a sequence that is cut across ranks: one exclusive scan of carries.

Each rank reduces its own keys to a state, the ranks scan these states (their size does not depend on the length), and
each adds what came before its first token. Local work lies between the launch of the scan and its wait, forward and
backward; the backward pass is the transposed scan. Two ways, the same result to rounding:

    one_walk   one walk takes sums from nothing and gives the state; a walk over the queries completes them, as far as
               gates leave something of the state before. Tokens behind that attend by themselves at once.
    two_walks  a walk over all keys gives the state; while the states travel, the first tokens' sums are taken from
               nothing and completed when they have arrived; the others attend in line, from the state before them.

One walk holds the sums of the tokens that it completes, V + 2 numbers per token and head. With gates that forget, few
tokens need completing. Without gates one walk was 4 to 15 % faster in the streaming form; with C kernels, which are
bound by memory, two walks are faster, and `TwoWalks` differentiates them by one.

Ranks need not walk alike: both ways exchange the same.

Shape letters: B batch, H heads, L queries and S keys here, K key size, V value size, M features, X sums of a token.
"""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import torch

from dist_attn.comm import Communicator
from dist_attn.comm import differentiable as collectives
from dist_attn.errors import InputError, ShapeError
from dist_attn.ops import LinearState
from dist_attn.ops.linear_attention import (
    LinearCall,
    OutputBuffers,
    SplitSequence,
    TwoWalks,
    absorb,
    attend,
    check_choice,
    choose,
    complete_sums,
    local_sums,
    tokens_until_forgotten,
)
from dist_attn.sharded.prefix_scan import ScanExchange, exclusive_scan, exclusive_scan_start
from dist_attn.sharded.trials import try_linear

Walks = Literal["one_walk", "two_walks"]

LOCAL_PASS = "local pass"  # in the traffic log
# The tokens that are attended while the states travel. On a CPU none: a state takes a millisecond, and to complete
# sums takes longer.
OVERLAP_TOKENS = {"cpu": 0, "cuda": 1024}


def sharded_linear_attention(
    comm: Communicator, call: LinearCall, *, exchange: ScanExchange | None = None, walks: Walks | None = None
) -> tuple[torch.Tensor, LinearState]:
    """`ops.linear_attention` of this rank's slice of queries and keys.

    The call's state is the one before the first global token, equal on all ranks; the state returned is the global
    final one, on every rank. Gradients of replicated inputs are this rank's share. `walks` is how the local work is cut
    (None: the faster way). An empty slice has no use for kernels.

    Shapes: as `ops.linear_attention` with L and S local; either may be 0, causal they are equal.
    Cost: one exchange of 4 B H (M (V + 1) + 2) bytes per rank (8 in place of 4 for float64) as in `exclusive_scan`,
        its transpose backward. One rank alone: nothing.
    Raises: ShapeError when shapes do not fit together; InputError for a prefix or documents; ConfigError, on ranks
        without tokens too, for an implementation that cannot take this call.
    Reference: Random Feature Attention, Eq. 6 and 7, as a scan over (log a, S, z).
    """
    call.check()
    if call.prefix or call.documents:
        raise InputError("a prefix and documents over ranks are for `ShardedSequenceOps.linear_attention`")
    if comm.size == 1:
        return attend(call)
    dtype, out_dtype = call.sums_dtype(), call.v_BHSV.dtype
    if not call.causal:
        check_choice(call, sums=dtype)
        try_linear(comm, call, dtype, "full")
        # Every query reads the state after the last key of all ranks; there is nothing left to absorb.
        own = absorb(replace(call.of_keys().streaming_if_empty(), state=None), dtype)
        _, after = exclusive_scan(comm, own, call.state, exchange)
        return attend(call.reading(after).streaming_if_empty())[0], after
    if call.queries != call.keys:
        raise ShapeError(
            f"causal attention over ranks needs as many queries as keys on a rank; rank {comm.rank} has "
            f"{call.queries} and {call.keys}"
        )
    q, k, v = (widened_for_grad_accumulation(x, dtype) for x in (call.q_BHLK, call.k_BHSK, call.v_BHSV))
    call = replace(call, q_BHLK=q, k_BHSK=k, v_BHSV=v)
    check_choice(call, sums=dtype)
    try_linear(comm, call, dtype, "full", "parts")
    if walks == "two_walks":
        try_linear(comm, call, dtype, "causal")
    segment = _Segment(comm, replace(call, state=None), call.state, dtype, exchange)
    if walks is None:
        walks = segment.faster_walks()
    out_BHLV, after = segment.attend_in_one_walk() if walks == "one_walk" else segment.attend_in_two_walks()
    return out_BHLV.to(out_dtype), after


def widened_for_grad_accumulation(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`x` such that the gradients of its two uses are added before they are rounded to half precision, not after.

    Rounded apart they were a quarter worse than on one rank. Without a gradient the blocks are widened one by one.
    """
    return x.to(dtype) if x.requires_grad and torch.is_grad_enabled() else x


@dataclass(frozen=True)
class _Segment:
    """This rank's part of a causal pass: a call from nothing, and the state before the first global token."""

    comm: Communicator
    call: LinearCall
    initial: LinearState | None
    dtype: torch.dtype  # the precision that one rank alone sums in
    exchange: ScanExchange | None

    def faster_walks(self) -> Walks:
        """Two where C kernels attend without gates, one otherwise."""
        return "two_walks" if self._native_without_gates() else "one_walk"

    def _native_without_gates(self) -> bool:
        if self.call.log_gate_BHS is not None or not self.call.queries:
            return False
        return choose(self.call, sums=self.dtype, form="parts").implementation == "native"

    def _absorb(self, start: int, state: LinearState | None) -> LinearState:
        """Absorb the keys from `start` on, after `state`."""
        return absorb(replace(self.call.tokens(start).streaming_if_empty(), state=state), self.dtype)

    def _of_keys(self, state: LinearState) -> LinearState:
        """The state, without a graph where nothing that it depends on wants gradients.

        One that came with outputs has a graph where queries want them; ranks whose states do not would differ.
        """
        _, *of_keys = self.call.sequence
        if any(t is not None and t.requires_grad for t in (*of_keys, *self.call.map_tensors)):
            return state
        return state.detach()

    def attend_in_two_walks(self) -> tuple[torch.Tensor, LinearState]:
        """Outputs and the global final state; the states travel while the first tokens' sums, if any, are taken."""
        tokens = self.call.keys
        first = min(_overlap(self.call), tokens)
        if not first and self._native_without_gates():
            walks = TwoWalks(self.call)
            before, after = exclusive_scan(self.comm, self._of_keys(walks.behind), self.initial, self.exchange)
            return walks.attend(before), after
        finish = exclusive_scan_start(self.comm, self._absorb(0, None), self.initial, self.exchange)
        split = SplitSequence(self.call, (first, tokens) if first < tokens else (tokens,))
        sums, first_state = self._sums(split.part(0), None)
        sums = collectives.marked(self.comm, sums, LOCAL_PASS)
        before, after = finish()
        outputs = [_complete(split.part(0), before, sums)]
        if first < tokens:
            rest = replace(split.part(1), state=before.combine(first_state))
            outputs.append(attend(rest.streaming_if_empty())[0])
        return split.join(outputs), after

    def attend_in_one_walk(self) -> tuple[torch.Tensor, LinearState]:
        """Outputs and the global final state; the states travel while the last tokens are worked on.

        Tokens up to `known` need the state before: their sums wait for it, those behind attend by themselves.
        """
        tokens = self.call.keys
        late = max(0, tokens - _overlap(self.call))
        known = tokens_until_forgotten(self.call.log_gate_BHS, tokens)
        # Parts end at these; the states travel while those from `late` on are worked on.
        cuts = sorted({known, late, tokens} - {0}) or [0]
        split = SplitSequence(self.call, cuts)
        sums: list[torch.Tensor] = []
        outputs: list[torch.Tensor] = []
        own: LinearState | None = None
        finish = None
        for number, (start, _) in enumerate(pairwise((0, *cuts))):
            if start == late:
                element = self._of_keys(self._absorb(late, own))
                finish = exclusive_scan_start(self.comm, element, self.initial, self.exchange)
            if start < known or not tokens:
                part, own = self._sums(split.part(number), own)
                sums.append(part)
            else:
                part, own = attend(replace(split.part(number), state=own).streaming_if_empty())
                outputs.append(part)
        if finish is None:
            assert own is not None  # there was a part
            finish = exclusive_scan_start(self.comm, self._of_keys(own), self.initial, self.exchange)
        sums[-1] = collectives.marked(self.comm, sums[-1], LOCAL_PASS)
        before, after = finish()
        if len(sums) == 1:
            first = _complete(split.part(0), before, sums[0])
        else:
            first = _complete(self.call.tokens(0, known), before, torch.cat(sums, dim=2))
        return split.join([first, *outputs]), after

    def _sums(self, part: LinearCall, state: LinearState | None) -> tuple[torch.Tensor, LinearState]:
        """Sums of a part, from nothing but `state`, and the state after."""
        return local_sums(replace(part, state=state).streaming_if_empty(), self.dtype)


def _complete(call: LinearCall, before: LinearState, sums_BHTX: torch.Tensor) -> torch.Tensor:
    """Outputs of the first tokens. Buffers of gradients are for those who took the sums."""
    buffers = None if call.buffers is None else OutputBuffers(call.buffers.out)
    return complete_sums(replace(call.streaming_if_empty(), state=before, buffers=buffers), sums_BHTX)


def _overlap(call: LinearCall) -> int:
    return OVERLAP_TOKENS.get(call.k_BHSK.device.type, 0)
