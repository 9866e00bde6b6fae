"""Relative attention in O(L): a kernel state for all keys, exact position scores in a window, two sums outside it.

Score of key j for query i: phi(q_i).phi(k_j) + W[i, clip(j - i, -k, k) + k] with W = phi(q) phi(rp)^T. A chunk of
queries takes the position scores of the chunk's own keys and of the k - 1 keys before it; every older key has the same
position score W[i, 0], so a running sum of values is enough. Keys after the query are the same thing the
other way.

Shape letters: B batch, H heads, L queries, S keys, K or M features, V values, W = V + 1 (v and a ones column),
R = 2 k + 1 rows of relative positions, T tokens of a window or of a few documents.

Reference: Scaleformer, Eq. 9 to 11 and Algorithm 2, with the sign clip(j - i) that its figure and code use.
"""

from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F

from dist_attn.errors import ShapeError
from dist_attn.ops.device import without_autocast
from dist_attn.ops.documents import document_runs, same_document, split_tokens, start_flags
from dist_attn.ops.local_sequence_ops import LocalSequenceOps
from dist_attn.ops.scan import MaybeTensors, OutputOnly, Tensors, scan
from dist_attn.ops.sequence_call import Implementation, local_form
from dist_attn.ops.sequence_ops import SequenceOps
from dist_attn_papers.ops.relative_attention.call import Form, RelativeCall, RelativeStreamCall, choose_relative
from dist_attn_papers.ops.relative_attention.numerators import WindowCarry, numerators, numerators_of_all, walk
from dist_attn_papers.ops.relative_attention.state import RelativeState, WindowState, normalised
from dist_attn_papers.ops.taken_rows import take_by_row

# So many tokens of whole documents share one masked score matrix.
TOGETHER_TOKENS = 128


def relative_attention(
    phi_q_BHLK: torch.Tensor,
    phi_k_BHSK: torch.Tensor,
    v_BHSV: torch.Tensor,
    phi_rp_HRK: torch.Tensor,
    *,
    causal: bool,
    form: Form = "windowed",
    implementation: Implementation = "auto",
    ops: SequenceOps | None = None,
) -> torch.Tensor:
    """Kernel attention with Shaw's relative positions, normalised by its own row sums.

    phi_rp has R = 2 k + 1 rows, row r for relative index (key - query) = r - k, the outermost for everything beyond.
    Causal with L != S is aligned at the top left. A query with no weight on any key, as one that sees none, has the
    output 0 and no gradient. `form` "naive" takes the whole score matrix, which is faster for a few dozen tokens.

    `implementation` names what computes the windowed form, see `call.choose_relative`: "triton" the kernels
    for a GPU, which "auto" takes where their trial comes out right; elsewhere torch's own operations ("streaming").
    Given `ops` run it by their own implementation, over ranks always in the windowed form.

    Shapes: phi_q [B, H, L, K], phi_k [B, H, S, K], v [B, H, S, V], phi_rp [H, R, K] -> [B, H, L, V].
    Raises: ShapeError when shapes do not fit together; InputError for an unknown form; ConfigError for an
        implementation that cannot take this call.
    """
    ops = ops or LocalSequenceOps(implementation=implementation)
    return ops.run(RelativeCall(phi_q_BHLK, phi_k_BHSK, v_BHSV, phi_rp_HRK, causal, form))


def relative_attention_naive(
    phi_q_BHLK: torch.Tensor,
    phi_k_BHSK: torch.Tensor,
    v_BHSV: torch.Tensor,
    phi_rp_HRK: torch.Tensor,
    *,
    causal: bool,
) -> torch.Tensor:
    """The oracle: phi(q_i).phi(k_j) + phi(q_i).phi(rp)_{clip(j - i, -k, k) + k} divided by its row sums, in O(L S).

    A query with no weight on any key, as one that sees none, has the output 0.
    """
    queries, keys, device = phi_q_BHLK.shape[2], phi_k_BHSK.shape[2], phi_q_BHLK.device
    reach = phi_rp_HRK.shape[1] // 2
    distance_LS = torch.arange(keys, device=device)[None, :] - torch.arange(queries, device=device)[:, None]
    row_LS = distance_LS.clamp(-reach, reach) + reach
    scores_BHLS = phi_q_BHLK @ phi_k_BHSK.transpose(-1, -2)
    positions_BHLR = phi_q_BHLK @ phi_rp_HRK.transpose(-1, -2)
    scores_BHLS = scores_BHLS + positions_BHLR.gather(-1, row_LS.expand_as(scores_BHLS))
    if causal:
        scores_BHLS = scores_BHLS.masked_fill(distance_LS > 0, 0.0)
    sums_BHL1 = scores_BHLS.sum(-1, keepdim=True)
    weights_BHLS = scores_BHLS / torch.where(sums_BHL1 == 0, torch.ones_like(sums_BHL1), sums_BHL1)
    return weights_BHLS.masked_fill(sums_BHL1 == 0, 0.0) @ v_BHSV


@local_form(RelativeCall)
def attend_relative(call: RelativeCall) -> torch.Tensor:
    """`relative_attention` of a call without a state; every packed document attends to itself alone.

    Cost: of documents O(128) per token of short ones, in one walk whose memory is flat in L; one call per long one.
    Raises: as `relative_attention`, and ConfigError for kernels asked for by name over documents.
    """
    if call.documents:
        return _attend_documents(call)
    call.check()
    if choose_relative(call).implementation == "triton":
        # Not at the top: a machine without a GPU need not have triton.
        from dist_attn_papers.ops.relative_attention.triton import triton_relative_attention

        return triton_relative_attention(call)
    q, k, v1, rp_HRK = call.widened()
    if call.form == "naive":
        with without_autocast(k.device):
            return relative_attention_naive(q, k, v1[..., :-1], rp_HRK, causal=call.causal).to(call.v_BHSV.dtype)
    if call.causal:
        # Keys after the last query are never seen; queries after the last key see zeros there, which add nothing.
        k, v1 = _fit(k, call.queries), _fit(v1, call.queries)
        num = numerators(q, k, v1, rp_HRK[:, : call.reach + 1], own=True)
    else:
        num = numerators_of_all(q, k, v1, rp_HRK)
    return normalised(num, call.v_BHSV.dtype)


def relative_attention_streaming(
    phi_q_BHLK: torch.Tensor,
    phi_k_BHLK: torch.Tensor,
    v_BHLV: torch.Tensor,
    phi_rp_HRK: torch.Tensor,
    state: RelativeState | None = None,
    *,
    implementation: Implementation = "auto",
    ops: SequenceOps | None = None,
) -> tuple[torch.Tensor, RelativeState]:
    """Causal `relative_attention` that continues after `state` (of no tokens when None), and the state after it.

    However a sequence is cut into calls, single tokens by `relative_attention_step` among them, the outputs are the
    same.

    Shapes: phi_q, phi_k [B, H, L, K], v [B, H, L, V], phi_rp [H, R, K] -> [B, H, L, V]; sums are float32, or float64
        for float64 values or state.
    Raises: ShapeError when shapes do not fit together, or the state is of another window; ConfigError for an
        implementation that cannot take this call.
    """
    ops = ops or LocalSequenceOps(implementation=implementation)
    return ops.run(RelativeStreamCall(phi_q_BHLK, phi_k_BHLK, v_BHLV, phi_rp_HRK, state))


@local_form(RelativeStreamCall)
def stream_call(stream: RelativeStreamCall) -> tuple[torch.Tensor, RelativeState]:
    """`relative_attention_streaming` of its call."""
    return stream_relative(stream.call)


def stream_relative(call: RelativeCall) -> tuple[torch.Tensor, RelativeState]:
    """`relative_attention_streaming` of a call.

    Raises: as `relative_attention_streaming`.
    """
    call.check()
    if call.queries != call.keys:
        raise ShapeError(f"{call.queries} queries and {call.keys} keys; a stream needs one key for each query")
    if choose_relative(call, form="stream").implementation == "triton":
        # Not at the top: a machine without a GPU need not have triton.
        from dist_attn_papers.ops.relative_attention.triton import triton_relative_attention_streaming

        return triton_relative_attention_streaming(call)
    (q, k, v1, rp_HRK), state = call.widened(), call.state
    if state is None:
        state = RelativeState.of(k[:, :, :0], v1[:, :, :0], call.width)
    num, after = walk(q, k, v1, rp_HRK[:, : call.reach + 1], True, WindowCarry.of(state, v1.dtype))
    window = WindowState(after.far_BHW, after.near_BHTW, state.window.length + call.keys)
    return normalised(num, call.v_BHSV.dtype), RelativeState(after.sz_BHMW, window)


def _attend_documents(call: RelativeCall) -> torch.Tensor:
    call.check()
    choose_relative(call)
    alone = replace(call, documents=(), implementation="streaming" if call.implementation == "streaming" else "auto")
    starts_11L = start_flags(call.documents, call.queries, call.phi_q_BHLK.device)[None, None]
    outputs = []
    runs = document_runs(call.documents, call.queries, TOGETHER_TOKENS)
    parts = split_tokens((*call.tensors[:3], starts_11L), [(a, b) for a, b, _ in runs])
    for (_, _, groups), (q, k, v, starts) in zip(runs, parts, strict=True):
        assert q is not None and k is not None and v is not None and starts is not None
        if not groups:
            outputs.append(attend_relative(alone.with_qkv(q, k, v)))
            continue
        out, _ = scan(
            OutputOnly(partial(_together, call.causal)),
            groups,
            (q, k, v, starts),
            (),
            (call.phi_rp_HRK,),
            output_shape=tuple(v.shape),
            output_dtype=v.dtype,
        )
        outputs.append(out)
    return torch.cat(outputs, dim=2) if outputs else attend_relative(alone)


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
    with without_autocast(q.device):
        scores_BHR = (q[..., None, :] @ phi_rp_HRK.to(dtype).transpose(-1, -2))[..., 0, :]
        near_BHT = scores_BHR[..., reach + 1 - seen_BHTW.shape[2] : reach + 1]
        num_BHW = (q[..., None, :] @ sz_BHMW)[..., 0, :] + (near_BHT[..., None, :] @ seen_BHTW)[..., 0, :]
    num_BHW = num_BHW + scores_BHR[..., :1] * state.window.far_BHW
    token = WindowState.of(v1_BHW[:, :, None], state.window.near_BHTW.shape[2])
    return normalised(num_BHW, v_BHV.dtype), RelativeState(sz_BHMW, state.window.combine(token))


def _together(causal: bool, sequence: MaybeTensors, parameters: Tensors) -> torch.Tensor:
    """Outputs by the whole score matrix of a few documents, 0 between two of them."""
    q, k, v, starts = sequence
    assert q is not None and k is not None and v is not None and starts is not None
    dtype = torch.promote_types(v.dtype, torch.float32)
    q_BHTK, k_BHTK, v_BHTV, rp_HRK = (t.to(dtype) for t in (q, k, v, parameters[0]))
    reach = rp_HRK.shape[1] // 2
    at_T = torch.arange(q.shape[2], device=q.device)
    row_TT = (at_T[None, :] - at_T[:, None]).clamp(-reach, reach) + reach
    scores_BHTT = q_BHTK @ k_BHTK.transpose(-1, -2)
    positions_BHTR = q_BHTK @ rp_HRK.transpose(-1, -2)
    scores_BHTT = scores_BHTT + take_by_row(positions_BHTR, row_TT)
    seen_TT = same_document(starts[0, 0])
    scores_BHTT = scores_BHTT.masked_fill(~(seen_TT.tril() if causal else seen_TT), 0.0)
    return normalised(scores_BHTT @ F.pad(v_BHTV, (0, 1), value=1.0), dtype)


def _fit(x_BHLK: torch.Tensor, length: int) -> torch.Tensor:
    """The first `length` tokens, with zeros behind where there are fewer."""
    return F.pad(x_BHLK[:, :, :length], (0, 0, 0, max(0, length - x_BHLK.shape[2])))
