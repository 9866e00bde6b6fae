"""Affine recurrences over a sequence that is cut across ranks, in one of two ways with the same result to rounding.

    in turn   each rank goes on from the state that the one before it has left, one group of heads at a time: every
              token is walked once, and a rank waits for the first group of those before it.
    scan      each rank reduces its tokens to what they do to a state, (A, B); these join by any exchange, and a second
              walk attends from the state before the rank's first token.

The walk for (A, B) takes more than the one that attends where tokens erase, since A is then a matrix, so that ranks
take turns unless they are many more than the heads.
"""

from dataclasses import replace

import torch

from dist_attn.ops.affine import AffineCall, AffineState, absorb, recur, recur_by_chunks
from dist_attn.ops.affine.call import AffineBuffers, Inputs
from dist_attn.ops.affine.implementation import attempt, fla_operation
from dist_attn.ops.parts import Parts, Whole, connected
from dist_attn.sharded.carry_scan import widened_for_grad_accumulation
from dist_attn.sharded.in_turn import heads_of_a_turn, in_turn
from dist_attn.sharded.prefix_scan import exclusive_scan
from dist_attn.sharded.sharding import Sharding, over_ranks
from dist_attn.sharded.trials import try_together


@over_ranks(AffineCall)
def recur_over_ranks(sharding: Sharding, call: AffineCall) -> tuple[torch.Tensor, AffineState]:
    """`ops.affine_recurrence` or `ops.gated_delta_rule` of this rank's slices, whose documents are the layout's.

    The call's state is the one before the first global token, equal on all ranks; the state returned is the global
    final one, on every rank. Gradients of replicated inputs are this rank's share. Ranks take turns where the exchange
    is "auto" and that is faster, and with `deterministic`; else any exchange by name takes a scan.

    Shapes: as `ops.affine_recurrence`, L local, which may be 0.
    Cost: in turn 4 B H K V bytes to the next rank and from the last to all; a scan of 4 B H (K V + |A|) bytes, with 1,
        K or K^2 numbers |A| (8 in place of 4 for float64). One rank alone: nothing.
    Raises: as `ops.affine_recurrence`.
    """
    comm = sharding.comm
    call = replace(call, documents=sharding.layout.documents_on(comm.rank))
    call.check()
    run = recur_by_chunks if sharding.deterministic else recur
    if comm.size == 1:
        return run(call)
    _, heads, size, values = call.state_shape
    together: int | None = max(1, heads)
    # How a product rounds depends on how many there are side by side, so that for the same bits none is left out.
    if not sharding.deterministic:
        together = heads_of_a_turn(sharding, call.state_shape, call.v_BHLV.device, erases=call.erases and size > 1)
    if together is not None:
        groups = _ByHeads(call, together)
        if not sharding.deterministic:
            _try_together(sharding, groups.calls[0])

        def work(some: slice, before_BHX: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            before = AffineState(before_BHX.unflatten(-1, (size, values)))
            out, after = run(replace(groups.calls[some.start // together], state=before))
            return out, after.s_BHKV.flatten(2)

        first_BHKV = connected(call.first_sums(call.sums_dtype()), groups.tie)
        later = sharding.when_there if sharding.one_way(call.v_BHLV) else None
        _, out, after_BHX = in_turn(comm, first_BHKV.flatten(2), together, work, groups.out.join, when_there=later)
        assert out is not None  # `work` returns outputs
        return out, AffineState(after_BHX.unflatten(-1, (size, values)))
    dtype, out_dtype = call.sums_dtype(), call.v_BHLV.dtype
    call = replace(call, products=call.products_dtype())  # which tensors that are widened do not show
    _try_together(sharding, call)
    wide = (None if t is None else widened_for_grad_accumulation(t, dtype) for t in call.sequence)
    call = call.with_sequence(tuple(wide))
    element = absorb(call)
    initial = None if call.state is None else element.begun(call.state)
    before, after = exclusive_scan(comm, element, initial, sharding.exchange)
    out, _ = run(replace(call, state=AffineState(before.s_BHKV)))
    # A copy: what is scanned is larger than the state, and a session would keep all of it.
    return out.to(out_dtype), AffineState(after.s_BHKV.contiguous())


def _try_together(sharding: Sharding, call: AffineCall) -> None:
    tried, comm, layout = attempt(call), sharding.comm, sharding.layout
    if call.implementation != "auto" or call.v_BHLV.device.type != "cuda" or tried is None:
        return
    # What a rank tries depends on documents that begin in its slice, and all ranks must know who has met what.
    packed = [bool(layout.documents_on(rank)) for rank in range(comm.size)] if layout.documents else []
    by = fla_operation(call), call.products_dtype(), call.state_shape, call.needs_gradients, packed
    try_together(comm, [tried], by)


class _ByHeads:
    """Calls of some heads each that make up a call, without states, and the outputs of all.

    `tie` has no numbers: whatever is `connected` to it depends on all inputs of the call.
    """

    def __init__(self, call: AffineCall, at_once: int) -> None:
        heads = call.state_shape[1]
        edges = (*range(0, max(1, heads), at_once), heads)
        bonus = None if call.bonus_HK is None else call.bonus_HK[None]
        cut = [None if x is None else Parts(x, edges, dim=1) for x in (*call.sequence, bonus)]
        self.out = Whole(call.v_BHLV, edges, dim=1)
        self.tie = torch.cat([x.tie for x in cut if x is not None])
        self.calls = []
        for group in range(len(edges) - 1):
            *sequence, bonus_1HK = (None if x is None else x.parts[group] for x in cut)
            places = (None if x is None else x.place(group) for x in cut[:-1])
            self.calls.append(
                replace(
                    call.with_sequence(tuple(sequence)),
                    bonus_HK=None if bonus_1HK is None else bonus_1HK[0],
                    state=None,
                    buffers=AffineBuffers(self.out.place(group), Inputs(*(*places, None, None))),
                )
            )
