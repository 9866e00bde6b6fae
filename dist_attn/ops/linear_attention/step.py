"""Linear attention of single tokens: one update of the state and one read-out, or a read-out alone, O(M V) per head.

One token after the other is also the oracle of whole sequences.

Shape letters: B batch, H heads, L queries, S keys, K head size, M features, V values.
"""

from dataclasses import replace

import torch

from dist_attn.ops.denominator import Denominator
from dist_attn.ops.device import without_autocast
from dist_attn.ops.feature_map import FeatureMap
from dist_attn.ops.finite import checked_step
from dist_attn.ops.kernel_target import kernel_target
from dist_attn.ops.linear_attention.call import LinearCall, state_dtype
from dist_attn.ops.linear_attention.implementation import choose_step
from dist_attn.ops.sequence_call import Implementation
from dist_attn.ops.state import LinearState, writes_in_place


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
    """The oracle of linear attention, the recurrence of RFA Eq. 6 and 7; see `linear_attention` for the arguments."""
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


@checked_step
def linear_attention_step(
    q_BHK: torch.Tensor,
    k_BHK: torch.Tensor,
    v_BHV: torch.Tensor,
    state: LinearState,
    *,
    feature_map: FeatureMap | None = None,
    log_gate_BH: torch.Tensor | None = None,
    key_scale_BH: torch.Tensor | None = None,
    denominator: Denominator | None = None,
    implementation: Implementation = "auto",
) -> tuple[torch.Tensor, LinearState]:
    """`linear_attention` for the one token after `state`.

    Inside `ops.state.steps_in_place` the state after is written over the one before.

    `implementation="triton"` has one kernel do all of it, for tensors on a GPU that need no gradients; see
    `implementation.choose_step` for when that is the default.

    Shapes: q, k [B, H, K], v [B, H, V], log_gate and key_scale [B, H] -> o [B, H, V] in v's dtype, the state after.
    Raises: ConfigError for an implementation that cannot take this call.
    Reference: Random Feature Attention, Eq. 6 and 7.
    """
    policy = Denominator() if denominator is None else denominator
    # One token leaves nothing to win by C kernels, and every step on a CPU would pay for the choice.
    on_gpu = v_BHV.device.type == "cuda" or kernel_target() is not None
    if on_gpu or implementation not in ("auto", "native"):
        step = LinearCall(
            q_BHK[:, :, None],
            k_BHK[:, :, None],
            v_BHV[:, :, None],
            None if log_gate_BH is None else log_gate_BH[:, :, None],
            None if key_scale_BH is None else key_scale_BH[:, :, None],
            feature_map=feature_map,
            state=state,
            denominator=policy,
            implementation=implementation,
        )
        choice = choose_step(step).implementation
        if choice == "triton":
            # Not at the top: a machine without a GPU need not have triton.
            from dist_attn.ops.linear_attention.triton_decode import triton_linear_attention_step

            return triton_linear_attention_step(step)
        if choice == "fla":
            # Likewise.
            from dist_attn.ops.linear_attention.fla import fla_linear_attention

            out_BH1V, state = fla_linear_attention(step)
            return out_BH1V[:, :, 0], state
    dtype = state.s_BHMV.dtype
    # Projections, sums and denominators keep the state's precision under autocast, as in the streaming form.
    with without_autocast(v_BHV.device):
        q_BH1K, k_BH1K = q_BHK[:, :, None].to(dtype), k_BHK[:, :, None].to(dtype)
        if feature_map is not None:
            q_BH1K, k_BH1K = feature_map(q_BH1K), feature_map(k_BH1K)
        state = state.advance(
            k_BH1K[:, :, 0],
            v_BHV,
            log_gate_BH=log_gate_BH,
            key_scale_BH=key_scale_BH,
            in_place=writes_in_place(),
        )
        num_BH1V, den_BH1 = state.read(q_BH1K)
        out_BH1V = policy.divide(num_BH1V, den_BH1, state.mass_BH[..., None])
    return out_BH1V[:, :, 0].to(v_BHV.dtype), state


def linear_attention_read(
    q_BHLK: torch.Tensor,
    state: LinearState,
    *,
    feature_map: FeatureMap | None = None,
    denominator: Denominator | None = None,
) -> torch.Tensor:
    """`linear_attention` of a few queries that see exactly `state`: it is read where it lies, once.

    Shapes: q [B, H, L, K] -> o [B, H, L, V] in q's dtype.
    Cost: O(M V) per query; the features of all of them exist at once.
    Reference: Random Feature Attention, Algorithm 2.
    """
    policy = Denominator() if denominator is None else denominator
    dtype = state_dtype(q_BHLK, state=state)
    with without_autocast(q_BHLK.device):
        phi_BHLM = q_BHLK.to(dtype) if feature_map is None else feature_map(q_BHLK.to(dtype))
        num_BHLV, den_BHL = state.to(dtype).read(phi_BHLM)
        return policy.divide(num_BHLV, den_BHL, state.mass_BH.to(dtype)[..., None]).to(q_BHLK.dtype)
