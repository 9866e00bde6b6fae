"""Linear attention across ranks with the bits of one rank: chunk after chunk, rank after rank, from in-line states.

A fold over the totals of ranks differs from one rank's fold over chunks by roundings; strong gates hide that, weak ones
do not. Here the state itself goes from rank to rank, every chunk is computed from it, and cuts lie between chunks: the
arithmetic is the same for any number of ranks, one included.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from dist_attn.comm import Communicator
from dist_attn.comm import differentiable as collectives
from dist_attn.errors import ShapeError
from dist_attn.layout import SequenceLayout
from dist_attn.ops import Denominator, FeatureMap, LinearState, absorb_keys
from dist_attn.ops.linear_attention import Implementation, check_choice, state_dtype
from dist_attn.ops.linear_attention.chunkwise import absorb_by_chunks, attend_by_chunks, read_by_chunks
from dist_attn.ops.linear_attention.streaming import CHUNK_TOKENS
from dist_attn.sharded.prefix_scan.state_message import pack, unpack
from dist_attn.sharded.prefix_scan.steps import LABEL, connected, rows_of, tied

__all__ = ["attention_in_order", "check_grid"]


def check_grid(layout: SequenceLayout) -> None:
    """Raises ShapeError unless every cut lies between chunks or at the end."""
    off = [cut for cut in layout.cuts if cut % CHUNK_TOKENS and cut != layout.total]
    if off:
        raise ShapeError(
            f"the layout has a cut at token {off[0]}; deterministic operations need cuts at multiples of "
            f"{CHUNK_TOKENS}: SequenceLayout.even(total, ranks, {CHUNK_TOKENS})"
        )


def attention_in_order(
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
    implementation: Implementation = "auto",
) -> tuple[torch.Tensor, LinearState]:
    """`sharded_linear_attention` whose outputs and states do not depend on the number of ranks, bit for bit.

    The gradients of q, k, v, gates and key scales do not either; those of what all ranks share (feature map, state in)
    are sums over the ranks' shares, which round by their number. `implementation` is what computes a chunk.

    Cost: |x| = 4 B H (M (V + 1) + 2) bytes to the next rank and, from the last one, to all: P - 1 steps that wait for
        each other. Without gradients a rank walks its keys, sends, and attends while the others walk; with gradients
        the ranks attend one after the other.
    """
    dtype = state_dtype(q_BHLK, k_BHSK, v_BHSV, state=state)
    check_choice(implementation, q_BHLK, k_BHSK, v_BHSV, feature_map=feature_map, state=state, sums=dtype)
    first = _before_all((k_BHSK, v_BHSV), (log_gate_BHS, key_scale_BHS), feature_map, state, dtype)

    def absorb(before: LinearState) -> tuple[None, LinearState]:
        after = absorb_by_chunks(
            k_BHSK,
            v_BHSV,
            before,
            feature_map=feature_map,
            log_gate_BHS=log_gate_BHS,
            key_scale_BHS=key_scale_BHS,
            implementation=implementation,
        )
        return None, after

    def attend(before: LinearState) -> tuple[torch.Tensor, LinearState]:
        return attend_by_chunks(
            q_BHLK,
            k_BHSK,
            v_BHSV,
            before,
            feature_map=feature_map,
            log_gate_BHL=log_gate_BHS,
            key_scale_BHL=key_scale_BHS,
            denominator=denominator,
            implementation=implementation,
        )

    if causal and torch.is_grad_enabled():
        _, out_BHLV, after = _in_turn(comm, first, attend)
        assert out_BHLV is not None  # `attend` gives one
        return out_BHLV, after
    before, _, after = _in_turn(comm, first, absorb)
    if causal:
        return attend(before)[0], after
    out_BHLV = read_by_chunks(
        q_BHLK, v_BHSV, after, feature_map=feature_map, denominator=denominator, implementation=implementation
    )
    return tied(out_BHLV, after.s_BHMV), after  # without queries nothing else leads back to the exchanges


def _before_all(
    keys_and_values: tuple[torch.Tensor, torch.Tensor],
    gate_and_scale: tuple[torch.Tensor | None, torch.Tensor | None],
    feature_map: FeatureMap | None,
    state: LinearState | None,
    dtype: torch.dtype,
) -> LinearState:
    """No keys yet: the state given, or that of no tokens, in the precision of the sums.

    It depends on every input, so that a rank without tokens has gradients too.
    """
    k, v = (x[:, :, :0] for x in keys_and_values)
    log_gate, key_scale = (None if x is None else x[:, :, :0] for x in gate_and_scale)
    return absorb_keys(
        k,
        v,
        feature_map=feature_map,
        log_gate_BHS=log_gate,
        key_scale_BHS=key_scale,
        state=state,
        dtype=dtype,
        implementation="streaming",
    )


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
