"""Linear attention across ranks with the bits of one rank: chunk after chunk, rank after rank, from in-line states.

A fold over the totals of ranks differs from one rank's fold over chunks by roundings; strong gates hide that, weak ones
do not. Here the state itself goes from rank to rank, every chunk is computed from it, and cuts lie between chunks: the
arithmetic is the same for any number of ranks, one included.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from dist_attn.comm import Communicator
from dist_attn.comm import differentiable as collectives
from dist_attn.errors import ShapeError
from dist_attn.layout import SequenceLayout
from dist_attn.ops import LinearState
from dist_attn.ops.linear_attention import LinearCall, absorb, check_choice
from dist_attn.ops.linear_attention.chunkwise import absorb_by_chunks, attend_by_chunks, read_by_chunks
from dist_attn.ops.linear_attention.streaming import CHUNK_TOKENS
from dist_attn.sharded.prefix_scan.state_message import pack, unpack
from dist_attn.sharded.prefix_scan.steps import LABEL, connected, rows_of, tied


def check_grid(layout: SequenceLayout) -> None:
    """Raises ShapeError unless every cut lies between chunks or at the end."""
    off = [cut for cut in layout.cuts if cut % CHUNK_TOKENS and cut != layout.total]
    if off:
        raise ShapeError(
            f"the layout has a cut at token {off[0]}; deterministic operations need cuts at multiples of "
            f"{CHUNK_TOKENS}: SequenceLayout.even(total, ranks, {CHUNK_TOKENS})"
        )


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
    if call.causal and torch.is_grad_enabled():
        _, out_BHLV, after = _in_turn(comm, first, partial(attend_by_chunks, call))
        assert out_BHLV is not None  # `attend_by_chunks` returns one
        return out_BHLV, after
    before, _, after = _in_turn(comm, first, lambda state: (None, absorb_by_chunks(call, state)))
    if call.causal:
        return attend_by_chunks(call, before)[0], after
    out_BHLV = read_by_chunks(call, after)
    return tied(out_BHLV, after.s_BHMV), after  # without queries nothing else leads back to the exchanges


def _in_turn(
    comm: Communicator,
    first: LinearState,
    work: Callable[[LinearState], tuple[torch.Tensor | None, LinearState]],
) -> tuple[LinearState, torch.Tensor | None, LinearState]:
    """Rank after rank works from the state that the one before it left: that state, the outputs, the global last one.

    Every rank makes all P - 1 steps and the broadcast, and whatever is used of the results, the backward pass goes
    through all of them.
    """
    before, out, own = first, None, first
    rows = pack(first)[None][:0]
    for turn in range(comm.size):
        if comm.rank == turn:
            before = unpack(rows[0], first) if turn else first
            out, own = work(before)
        if turn + 1 < comm.size:
            sent = rows_of([pack(own)] if comm.rank == turn else [], rows)
            send = {turn + 1: 1} if comm.rank == turn else {}
            recv = {turn: 1} if comm.rank == turn + 1 else {}
            rows = collectives.send_receive(comm, sent, send, recv, label=LABEL)
    if comm.size == 1:
        return before, out, own
    last_BHX = collectives.broadcast(comm, connected(pack(own), rows), comm.size - 1, label=LABEL)
    after = replace(unpack(last_BHX, first), reset_BH=first.reset_BH)
    return before, None if out is None else tied(out, last_BHX), after
