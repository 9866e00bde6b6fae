"""Linear attention over a sequence that is cut across ranks: one all-gather of carries and a fixed fold.

Each rank reduces its own keys to a state, all ranks exchange these states (their size does not depend on the
length), each folds the ones before it into the state its first token sees, and attends locally from there.
The backward pass is the transposed exchange, a reduce-scatter of the states' gradients.
"""

import torch

from dist_attn.comm import Communicator
from dist_attn.comm import differentiable as collectives
from dist_attn.ops import Denominator, FeatureMap, LinearState, absorb_keys, linear_attention
from dist_attn.ops.linear_attention import state_dtype

__all__ = ["carry_scan", "sharded_linear_attention"]


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
) -> tuple[torch.Tensor, LinearState]:
    """`ops.linear_attention` on this rank's slice of queries and keys.

    `state` is the one before the first global token, equal on all ranks; the state returned is the global final one,
    on every rank. Gradients of replicated inputs are this rank's share.

    Shapes: as `ops.linear_attention` with L and S local; either may be 0.
    Cost: one all-gather of 4 B H (M (V + 1) + 2) bytes per rank forward (8 in place of 4 for float64), its transpose
        backward; a second pass over the local keys for the state they leave. One rank alone: nothing of both.
    Reference: Random Feature Attention, Eq. 6 and 7, as a scan over (log a, S, z).
    """
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
        )
    segment = absorb_keys(
        k_BHSK,
        v_BHSV,
        feature_map=feature_map,
        log_gate_BHS=log_gate_BHS,
        key_scale_BHS=key_scale_BHS,
        # Of the precision that one rank alone would sum in.
        dtype=state_dtype(q_BHLK, k_BHSK, v_BHSV, state=state),
    )
    before, after = carry_scan(comm, segment, state)
    if not causal:
        # Every query reads the state after the last key of all ranks; there is nothing left to absorb.
        out, _ = linear_attention(
            q_BHLK,
            k_BHSK[:, :, :0],
            v_BHSV[:, :, :0],
            feature_map=feature_map,
            causal=False,
            state=after,
            denominator=denominator,
        )
        return out, after
    out, _ = linear_attention(
        q_BHLK,
        k_BHSK,
        v_BHSV,
        feature_map=feature_map,
        log_gate_BHS=log_gate_BHS,
        key_scale_BHS=key_scale_BHS,
        causal=True,
        state=before,
        denominator=denominator,
    )
    return out, after


def carry_scan(
    comm: Communicator, segment: LinearState, initial: LinearState | None
) -> tuple[LinearState, LinearState]:
    """The state before this rank's first token and the one after the last token of all ranks.

    The fold runs over all ranks in the same order everywhere, so every rank computes the same final state, bit for bit.
    """
    gathered_P = collectives.all_gather(comm, _pack(segment), label="carry")
    states = [_unpack(packed, segment) for packed in gathered_P.unbind(0)]
    if initial is None:
        batch, heads, features, values = segment.s_BHMV.shape
        dtype, device = segment.s_BHMV.dtype, segment.s_BHMV.device
        initial = LinearState.identity(batch, heads, features, values, dtype=dtype, device=device)
    prefixes = [initial]
    for later in states:
        prefixes.append(prefixes[-1].combine(later))
    # Stack, then pick: rank 0 needs nobody's state, but its graph must still reach the exchange, or its backward pass
    # would leave the other ranks waiting in theirs.
    before = LinearState(*(torch.stack(f)[comm.rank] for f in zip(*(p.tensors() for p in prefixes), strict=True)))
    return before, prefixes[-1]


def _pack(state: LinearState) -> torch.Tensor:
    """One flat message per batch element and head, [B, H, M V + M + 2]."""
    return torch.cat(
        [state.s_BHMV.flatten(2), state.z_BHM, state.mass_BH[..., None], state.log_decay_BH[..., None]], dim=-1
    )


def _unpack(packed_BHN: torch.Tensor, like: LinearState) -> LinearState:
    features, values = like.s_BHMV.shape[2:]
    s_BHN, z_BHM, mass_BH1, log_decay_BH1 = packed_BHN.split((features * values, features, 1, 1), dim=-1)
    return LinearState(
        s_BHN.unflatten(-1, (features, values)),
        z_BHM,
        mass_BH1[..., 0],
        log_decay_BH1[..., 0],
        torch.zeros_like(like.reset_BH),
    )
