"""Relative attention in O(L): a kernel state for all keys, exact position scores in a window, two sums outside it.

Score of key j for query i: phi(q_i).phi(k_j) + W[i, clip(j - i, -k, k) + k] with W = phi(q) phi(rp)^T. A chunk of
queries takes the position scores of the chunk's own keys and of the k - 1 keys before it; every older key has the same
position score W[i, 0], so a running sum of values is enough (`causal`). Keys after the query are the same thing the
other way (`both_sides`).

Reference: Scaleformer, Eq. 9 to 11 and Algorithm 2, with the sign clip(j - i) that its figure and code use.
"""

from typing import Literal

import torch
import torch.nn.functional as F

from dist_attn.errors import InputError, ShapeError
from dist_attn.ops.linear_attention.call import Implementation
from dist_attn.ops.relative_attention.both_sides import numerators_of_all
from dist_attn.ops.relative_attention.causal import carry_of, numerators, walk
from dist_attn.ops.relative_attention.implementation import choose_relative
from dist_attn.ops.relative_attention.naive import relative_attention_naive
from dist_attn.ops.relative_attention.state import (
    RelativeState,
    WindowState,
    check_relative_shapes,
    check_relative_state,
    normalised,
)

__all__ = [
    "Form",
    "check_relative_shapes",
    "check_relative_state",
    "normalised",
    "relative_attention",
    "relative_attention_step",
    "relative_attention_streaming",
]

Form = Literal["windowed", "naive"]

_Tensors = tuple[torch.Tensor, ...]


def relative_attention(
    phi_q_BHLK: torch.Tensor,
    phi_k_BHSK: torch.Tensor,
    v_BHSV: torch.Tensor,
    phi_rp_HRK: torch.Tensor,
    *,
    causal: bool,
    form: Form = "windowed",
    implementation: Implementation = "auto",
) -> torch.Tensor:
    """Kernel attention with Shaw's relative positions, normalised by its own row sums.

    phi_rp has R = 2 k + 1 rows, row r for relative index (key - query) = r - k, the outermost for everything beyond.
    Causal with L != S is aligned at the top left. A query with no weight on any key, as one that sees none, has the
    output 0 and no gradient. `form` "naive" takes the whole score matrix, which is faster for a few dozen tokens.

    `implementation` names what computes the windowed form, see `implementation.choose_relative`: "triton" the kernels
    for a GPU, which "auto" takes by itself only once they have run on one; until then, and elsewhere, torch's own
    operations ("streaming").

    Shapes: phi_q [B, H, L, K], phi_k [B, H, S, K], v [B, H, S, V], phi_rp [H, R, K] -> [B, H, L, V].
    Raises: ShapeError when shapes do not fit together; InputError for an unknown form; ConfigError for an
        implementation that cannot take this call.
    """
    check_relative_shapes(phi_q_BHLK, phi_k_BHSK, v_BHSV, phi_rp_HRK)
    if form not in ("windowed", "naive"):
        raise InputError(f"form {form!r} of relative attention was given; there are 'windowed' and 'naive'")
    choice = choose_relative(implementation, phi_q_BHLK, phi_k_BHSK, v_BHSV, phi_rp_HRK, form=form)
    if choice.implementation == "triton":
        # Not at the top: a machine without a GPU need not have triton.
        from dist_attn.ops.relative_attention.triton import triton_relative_attention

        return triton_relative_attention(phi_q_BHLK, phi_k_BHSK, v_BHSV, phi_rp_HRK, causal=causal)
    queries = phi_q_BHLK.shape[2]
    q, k, v1, rp_HRK = _widened(phi_q_BHLK, phi_k_BHSK, v_BHSV, phi_rp_HRK)
    if form == "naive":
        with torch.autocast(k.device.type, enabled=False):
            return relative_attention_naive(q, k, v1[..., :-1], rp_HRK, causal=causal).to(v_BHSV.dtype)
    reach = rp_HRK.shape[1] // 2
    if causal:
        # Keys after the last query are never seen; queries after the last key see zeros there, which add nothing.
        k, v1 = _fit(k, queries), _fit(v1, queries)
        num = numerators(q, k, v1, rp_HRK[:, : reach + 1], own=True)
    else:
        num = numerators_of_all(q, k, v1, rp_HRK)
    return normalised(num, v_BHSV.dtype)


def relative_attention_streaming(
    phi_q_BHLK: torch.Tensor,
    phi_k_BHLK: torch.Tensor,
    v_BHLV: torch.Tensor,
    phi_rp_HRK: torch.Tensor,
    state: RelativeState | None = None,
    *,
    implementation: Implementation = "auto",
) -> tuple[torch.Tensor, RelativeState]:
    """Causal `relative_attention` that continues after `state` (of no tokens when None), and the state after it.

    However a sequence is cut into calls, single tokens by `relative_attention_step` among them, the outputs are the
    same.

    Shapes: phi_q, phi_k [B, H, L, K], v [B, H, L, V], phi_rp [H, R, K] -> [B, H, L, V]; sums are float32, or float64
        for float64 values or state.
    Raises: ShapeError when shapes do not fit together, or the state is of another window; ConfigError for an
        implementation that cannot take this call.
    """
    check_relative_shapes(phi_q_BHLK, phi_k_BHLK, v_BHLV, phi_rp_HRK)
    if phi_q_BHLK.shape[2] != phi_k_BHLK.shape[2]:
        raise ShapeError(
            f"{phi_q_BHLK.shape[2]} queries and {phi_k_BHLK.shape[2]} keys; a stream needs one key for each query"
        )
    choice = choose_relative(implementation, phi_q_BHLK, phi_k_BHLK, v_BHLV, phi_rp_HRK, state=state)
    if choice.implementation == "triton":
        # Not at the top: a machine without a GPU need not have triton.
        from dist_attn.ops.relative_attention.triton import triton_relative_attention_streaming

        return triton_relative_attention_streaming(phi_q_BHLK, phi_k_BHLK, v_BHLV, phi_rp_HRK, state)
    q, k, v1, rp_HRK = _widened(phi_q_BHLK, phi_k_BHLK, v_BHLV, phi_rp_HRK, state)
    reach = rp_HRK.shape[1] // 2
    if state is None:
        state = RelativeState.of(k[:, :, :0], v1[:, :, :0], max(reach - 1, 0))
    check_relative_state(state, k, v1, reach)
    num, (sz_BHMW, far_BHW, near_BHTW) = walk(q, k, v1, rp_HRK[:, : reach + 1], True, carry_of(state, v1.dtype))
    window = WindowState(far_BHW, near_BHTW, state.window.length + v1.shape[2])
    return normalised(num, v_BHLV.dtype), RelativeState(sz_BHMW, window)


def relative_attention_step(
    phi_q_BHK: torch.Tensor,
    phi_k_BHK: torch.Tensor,
    v_BHV: torch.Tensor,
    phi_rp_HRK: torch.Tensor,
    state: RelativeState,
) -> tuple[torch.Tensor, RelativeState]:
    """Causal `relative_attention` for the one token after `state`, whose window is as wide as phi_rp reaches.

    Shapes: phi_q, phi_k [B, H, K], v [B, H, V], phi_rp [H, R, K] -> [B, H, V] and the state after the token.
    """
    dtype = state.sz_BHMW.dtype
    reach = phi_rp_HRK.shape[1] // 2
    v1_BHW = F.pad(v_BHV.to(dtype), (0, 1), value=1.0)
    q, k = phi_q_BHK.to(dtype), phi_k_BHK.to(dtype)
    sz_BHMW = state.sz_BHMW + k[..., :, None] * v1_BHW[..., None, :]
    seen_BHTW = torch.cat([state.window.near_BHTW, v1_BHW[:, :, None]], dim=2)
    with torch.autocast(q.device.type, enabled=False):
        scores_BHR = (q[..., None, :] @ phi_rp_HRK.to(dtype).transpose(-1, -2))[..., 0, :]
        near_BHT = scores_BHR[..., reach + 1 - seen_BHTW.shape[2] : reach + 1]
        num_BHW = (q[..., None, :] @ sz_BHMW)[..., 0, :] + (near_BHT[..., None, :] @ seen_BHTW)[..., 0, :]
    num_BHW = num_BHW + scores_BHR[..., :1] * state.window.far_BHW
    token = WindowState.of(v1_BHW[:, :, None], state.window.near_BHTW.shape[2])
    return normalised(num_BHW, v_BHV.dtype), RelativeState(sz_BHMW, state.window.combine(token))


def _widened(
    phi_q: torch.Tensor,
    phi_k: torch.Tensor,
    v: torch.Tensor,
    phi_rp: torch.Tensor,
    state: RelativeState | None = None,
) -> _Tensors:
    """All of them in the precision of the sums, v with a column of ones."""
    dtype = torch.promote_types(v.dtype, torch.float32 if state is None else state.sz_BHMW.dtype)
    return phi_q.to(dtype), phi_k.to(dtype), F.pad(v.to(dtype), (0, 1), value=1.0), phi_rp.to(dtype)


def _fit(x_BHLK: torch.Tensor, length: int) -> torch.Tensor:
    """The first `length` tokens, with zeros behind where there are fewer."""
    return F.pad(x_BHLK[:, :, :length], (0, 0, 0, max(0, length - x_BHLK.shape[2])))
