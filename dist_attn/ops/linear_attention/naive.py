"""The oracle of linear attention: the recurrence of RFA Eq. 6 and 7, one token after the other.

Shape letters: B batch, H heads, L queries, S keys, K head size, V values.
"""

from dataclasses import replace

import torch

from dist_attn.ops.denominator import Denominator
from dist_attn.ops.feature_map import FeatureMap
from dist_attn.ops.state import LinearState


def linear_attention_naive(
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
    documents: tuple[int, ...] | None = None,
    prefix: int = 0,
) -> tuple[torch.Tensor, LinearState]:
    """Linear attention by its plainest definition; see `linear_attention` for the meaning of the arguments."""
    policy = Denominator() if denominator is None else denominator
    phi_q = q_BHLK if feature_map is None else feature_map(q_BHLK)
    phi_k = k_BHSK if feature_map is None else feature_map(k_BHSK)
    batch, heads, num_queries, features = phi_q.shape
    num_keys, values = v_BHSV.shape[2:]
    dtype = torch.promote_types(v_BHSV.dtype, torch.float32)
    if state is None:
        state = LinearState.identity(batch, heads, features, values, dtype=dtype, device=v_BHSV.device)

    def readout(t: int, state: LinearState) -> torch.Tensor:
        num_BH1V, den_BH1 = state.read(phi_q[:, :, t : t + 1])
        return policy.divide(num_BH1V, den_BH1, state.mass_BH[..., None])

    outputs: list[torch.Tensor] = []
    for t in range(num_keys):
        if documents is not None and t in documents:
            if not causal:
                outputs += [readout(i, state) for i in range(len(outputs), t)]
            nothing = LinearState.identity(batch, heads, features, values, dtype=dtype, device=v_BHSV.device)
            state = replace(nothing, reset_BH=torch.ones_like(nothing.reset_BH))
        state = state.advance(
            phi_k[:, :, t],
            v_BHSV[:, :, t],
            log_gate_BH=None if log_gate_BHS is None else log_gate_BHS[:, :, t],
            key_scale_BH=None if key_scale_BHS is None else key_scale_BHS[:, :, t],
        )
        if t + 1 == prefix:
            outputs += [readout(i, state) for i in range(min(prefix, num_queries))]
        elif causal and prefix <= t < num_queries:
            outputs.append(readout(t, state))
    outputs += [readout(t, state) for t in range(len(outputs), num_queries)]
    empty = v_BHSV.new_empty((batch, heads, 0, values), dtype=dtype)
    return torch.cat([empty, *outputs], dim=2).to(v_BHSV.dtype), state
