"""Linear attention over a sequence that is cut across ranks: one exclusive scan of carries.

Each rank reduces its own keys to a state, the ranks scan these states (their size does not depend on the length), and
each attends locally from the state before its first token. The backward pass is the transposed exchange.
"""

import torch

from dist_attn.comm import Communicator
from dist_attn.ops import Denominator, FeatureMap, LinearState, absorb_keys, linear_attention
from dist_attn.ops.linear_attention import state_dtype
from dist_attn.sharded.prefix_scan import Exchange, exclusive_scan

__all__ = ["sharded_linear_attention"]


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
) -> tuple[torch.Tensor, LinearState]:
    """`ops.linear_attention` on this rank's slice of queries and keys.

    `state` is the one before the first global token, equal on all ranks; the state returned is the global final one,
    on every rank. Gradients of replicated inputs are this rank's share.

    Shapes: as `ops.linear_attention` with L and S local; either may be 0.
    Cost: one exchange of 4 B H (M (V + 1) + 2) bytes per rank (8 in place of 4 for float64) as in `exclusive_scan`,
        its transpose backward; a second pass over the local keys for the state they leave. One rank alone: nothing of
        both.
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
    # Of the precision that one rank alone would sum in.
    dtype, given = state_dtype(q_BHLK, k_BHSK, v_BHSV, state=state), v_BHSV.dtype
    if causal:
        k_BHSK, v_BHSV = _for_two_uses(k_BHSK, dtype), _for_two_uses(v_BHSV, dtype)
    segment = absorb_keys(
        k_BHSK,
        v_BHSV,
        feature_map=feature_map,
        log_gate_BHS=log_gate_BHS,
        key_scale_BHS=key_scale_BHS,
        dtype=dtype,
    )
    before, after = exclusive_scan(comm, segment, state, exchange)
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
    return out.to(given), after


def _for_two_uses(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`x` such that the gradients of its two uses are added before they are rounded to half precision, not after.

    Rounded apart they were a quarter worse than on one rank. Without a gradient the blocks are widened one by one.
    """
    return x.to(dtype) if x.requires_grad and torch.is_grad_enabled() else x
