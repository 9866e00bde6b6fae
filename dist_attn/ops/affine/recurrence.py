"""Affine recurrences along a sequence: vector decays, delta rules, and any erasure of rank one.

Shape letters: B batch, H heads, L tokens, K key size, V values.
"""

from dataclasses import replace

import torch

from dist_attn.ops.affine.call import AffineCall, Read, check_read
from dist_attn.ops.affine.implementation import choose
from dist_attn.ops.affine.native import native_absorb, native_recurrence
from dist_attn.ops.affine.state import AffineState
from dist_attn.ops.affine.streaming import stream_absorb, stream_recurrence
from dist_attn.ops.device import without_autocast
from dist_attn.ops.linear_attention.attention import chunk_ranges
from dist_attn.ops.sequence_call import Implementation, local_form
from dist_attn.ops.state import writes_in_place


def affine_recurrence(
    q_BHLK: torch.Tensor,
    k_BHLK: torch.Tensor,
    v_BHLV: torch.Tensor,
    *,
    log_decay_BHLK: torch.Tensor,
    erase: tuple[torch.Tensor, torch.Tensor] | None = None,
    bonus_HK: torch.Tensor | None = None,
    read: Read = "after",
    state: AffineState | None = None,
    documents: tuple[int, ...] | None = None,
    implementation: Implementation = "auto",
) -> tuple[torch.Tensor, AffineState]:
    """S_t = (diag(exp log_decay_t) + a_t b_t^T) S_{t-1} + k_t v_t^T, o_t = q_t^T S_t, in O(L).

    `erase` is (a, b). A log decay is one number for a head, or one for each key channel; -inf closes the gate. With
    `read="before"` a query sees the state before its token, and of its own token bonus * k v^T (RWKV-6).

    `documents` are the positions at which documents start; each begins from zeros. The state in is that of the tokens
    before the first start, the state out that of the last document.

    `implementation` names what computes it, see `affine.implementation.choose`.

    Shapes: q, k, a, b [B, H, L, K], v [B, H, L, V], log_decay [B, H, L, 1] or [B, H, L, K], bonus [H, K] ->
        o [B, H, L, V] in v's dtype and the state to go on from, float32 or wider.
    Raises: ShapeError when shapes do not fit together; InputError for a bonus with read="after", or another `read`;
        ConfigError for an implementation that cannot take this call.
    Reference: Yang et al. 2024, Gated Linear Attention, Eq. 3; Peng et al. 2024, Eagle and Finch (RWKV-6), Eq. 19;
        Peng et al. 2025, RWKV-7, Eq. 17.
    """
    return recur(
        AffineCall(
            q_BHLK,
            k_BHLK,
            v_BHLV,
            log_decay_BHLK,
            erase,
            bonus_HK=bonus_HK,
            read=read,
            state=state,
            documents=documents or (),
            implementation=implementation,
        )
    )


def affine_recurrence_naive(
    q_BHLK: torch.Tensor,
    k_BHLK: torch.Tensor,
    v_BHLV: torch.Tensor,
    *,
    log_decay_BHLK: torch.Tensor,
    erase: tuple[torch.Tensor, torch.Tensor] | None = None,
    bonus_HK: torch.Tensor | None = None,
    read: Read = "after",
    state: AffineState | None = None,
    documents: tuple[int, ...] = (),
) -> tuple[torch.Tensor, AffineState]:
    """`affine_recurrence` token by token: the oracle of every other form."""
    batch, heads, tokens, size = k_BHLK.shape
    zeros_BHKV = v_BHLV.new_zeros((batch, heads, size, v_BHLV.shape[3]))
    s_BHKV = zeros_BHKV if state is None else state.s_BHKV
    outputs = []
    for t in range(tokens):
        q, k, v = q_BHLK[:, :, t, None], k_BHLK[:, :, t, :, None], v_BHLV[:, :, t, None]
        before = zeros_BHKV if t in documents else s_BHKV
        s_BHKV = log_decay_BHLK[:, :, t].exp()[..., None] * before + k * v
        if erase is not None:
            a, b = (x[:, :, t] for x in erase)
            s_BHKV = s_BHKV + a[..., None] * (b[..., None, :] @ before)
        if read == "after":
            outputs.append(q @ s_BHKV)
        else:
            outputs.append(q @ before + (0.0 if bonus_HK is None else (q * bonus_HK[:, None]) @ k * v))
    out = torch.cat(outputs, dim=2) if outputs else torch.zeros_like(v_BHLV)
    return out, AffineState(s_BHKV)


def gated_delta_rule(
    q_BHLK: torch.Tensor,
    k_BHLK: torch.Tensor,
    v_BHLV: torch.Tensor,
    *,
    beta_BHL: torch.Tensor,
    log_decay_BHLK: torch.Tensor,
    state: AffineState | None = None,
    documents: tuple[int, ...] | None = None,
    implementation: Implementation = "auto",
) -> tuple[torch.Tensor, AffineState]:
    """S_t = (1 - beta_t k_t k_t^T) diag(exp log_decay_t) S_{t-1} + beta_t k_t v_t^T, o_t = q_t^T S_t, in O(L).

    Keys come as they are: where a model normalises them, that is the caller's. beta may exceed 1.

    Shapes: as `affine_recurrence`, beta [B, H, L].
    Raises: as `affine_recurrence`.
    Reference: Yang et al. 2024, Gated Delta Networks, Eq. 10; with a decay for each channel Kimi Linear, 2025, Eq. 1.
    """
    return recur(
        AffineCall(
            q_BHLK,
            k_BHLK,
            v_BHLV,
            log_decay_BHLK,
            beta_BHL=beta_BHL,
            state=state,
            documents=documents or (),
            implementation=implementation,
        )
    )


def gated_delta_rule_naive(
    q_BHLK: torch.Tensor,
    k_BHLK: torch.Tensor,
    v_BHLV: torch.Tensor,
    *,
    beta_BHL: torch.Tensor,
    log_decay_BHLK: torch.Tensor,
    state: AffineState | None = None,
    documents: tuple[int, ...] = (),
) -> tuple[torch.Tensor, AffineState]:
    """`gated_delta_rule` token by token: the oracle of every other form."""
    batch, heads, tokens, size = k_BHLK.shape
    zeros_BHKV = v_BHLV.new_zeros((batch, heads, size, v_BHLV.shape[3]))
    s_BHKV = zeros_BHKV if state is None else state.s_BHKV
    outputs = []
    for t in range(tokens):
        k, v = k_BHLK[:, :, t, :, None], v_BHLV[:, :, t, None]
        decayed = log_decay_BHLK[:, :, t].exp()[..., None] * (zeros_BHKV if t in documents else s_BHKV)
        s_BHKV = decayed + beta_BHL[:, :, t, None, None] * k * (v - k.mT @ decayed)
        outputs.append(q_BHLK[:, :, t, None] @ s_BHKV)
    out = torch.cat(outputs, dim=2) if outputs else torch.zeros_like(v_BHLV)
    return out, AffineState(s_BHKV)


@local_form(AffineCall)
def recur(call: AffineCall) -> tuple[torch.Tensor, AffineState]:
    """`affine_recurrence` or `gated_delta_rule` of a call.

    Raises: as these.
    """
    call.check()
    if torch.compiler.is_compiling() and call.tokens == 1 and call.state is not None and not call.documents:
        return _one_token(call, call.state)
    chosen = choose(call).implementation
    if chosen == "fla":
        from dist_attn.ops.affine.fla import fla_recurrence  # a machine without a GPU need not have fla

        return fla_recurrence(call)
    return native_recurrence(call) if chosen == "native" else stream_recurrence(call)


def _one_token(call: AffineCall, state: AffineState) -> tuple[torch.Tensor, AffineState]:
    """A step, which a compiler makes a few loops of: it would take the streaming form for what that is written as."""
    q, k, v, decay, a, b, beta = (None if t is None else t[:, :, 0] for t in call.sequence)
    assert q is not None and k is not None and v is not None and decay is not None
    before = AffineState(state.s_BHKV.to(call.sums_dtype()))
    if beta is not None:
        out_BHV, after = gated_delta_step(q, k, v, before, beta_BH=beta, log_decay_BHK=decay)
    else:
        erase = None if a is None or b is None else (a, b)
        out_BHV, after = affine_step(
            q, k, v, before, log_decay_BHK=decay, erase=erase, bonus_HK=call.bonus_HK, read=call.read
        )
    return out_BHV[:, :, None], after


def recur_by_chunks(call: AffineCall) -> tuple[torch.Tensor, AffineState]:
    """`recur` chunk by chunk, so that bits do not depend on where between chunks a sequence is cut.

    How a matrix product rounds depends on how many there are side by side, and on the strides of its matrices. On a GPU
    it is the streaming form unless another is named: tiles are measured, so that ranks may differ in them.
    """
    call.check()
    if call.implementation == "auto" and call.v_BHLV.device.type == "cuda":
        call = replace(call, implementation="streaming")
    ranges = chunk_ranges(call.tokens)
    if not ranges:
        return recur(call)
    outputs, state = [], call.state
    for start, stop in ranges:
        part = call.part(start, stop)
        part = part.with_sequence(tuple(None if t is None else t.contiguous() for t in part.sequence))
        out, state = recur(replace(part, state=state))
        outputs.append(out)
    assert state is not None  # there were chunks
    return torch.cat(outputs, dim=2), state


def absorb(call: AffineCall) -> AffineState:
    """The state that the call's tokens leave and their effect on a state before them; the call's own state is ignored.

    Raises: as `affine_recurrence`.
    """
    call.check()
    native = choose(call).implementation == "native"
    return native_absorb(call) if native else stream_absorb(call, call.sums_dtype())


def affine_step(
    q_BHK: torch.Tensor,
    k_BHK: torch.Tensor,
    v_BHV: torch.Tensor,
    state: AffineState,
    *,
    log_decay_BHK: torch.Tensor,
    erase: tuple[torch.Tensor, torch.Tensor] | None = None,
    bonus_HK: torch.Tensor | None = None,
    read: Read = "after",
) -> tuple[torch.Tensor, AffineState]:
    """`affine_recurrence` for the one token after `state`.

    Shapes: q, k, a, b [B, H, K], v [B, H, V], log_decay [B, H, 1] or [B, H, K] -> o [B, H, V] and the state after.
    Raises: InputError for a bonus with read="after", or another `read`.
    """
    check_read(read, bonus_HK)
    before = state.s_BHKV
    with without_autocast(v_BHV.device):
        q, k, v, decay = (x.to(before.dtype) for x in (q_BHK, k_BHK, v_BHV, log_decay_BHK))
        taken = None if erase is None else (erase[0].to(before.dtype), _read(before, erase[1].to(before.dtype)))
        out = None
        if read == "before":
            out = _read(before, q)
            if bonus_HK is not None:
                out = out + (q * bonus_HK.to(before.dtype) * k).sum(-1, keepdim=True) * v
        after = _written(before, decay.exp(), k, v, taken)
        out = _read(after, q) if out is None else out
    return out.to(v_BHV.dtype), AffineState(after)


def gated_delta_step(
    q_BHK: torch.Tensor,
    k_BHK: torch.Tensor,
    v_BHV: torch.Tensor,
    state: AffineState,
    *,
    beta_BH: torch.Tensor,
    log_decay_BHK: torch.Tensor,
) -> tuple[torch.Tensor, AffineState]:
    """`gated_delta_rule` for the one token after `state`; shapes as `affine_step`, beta [B, H]."""
    before = state.s_BHKV
    with without_autocast(v_BHV.device):
        q, k, v, decay, beta = (x.to(before.dtype) for x in (q_BHK, k_BHK, v_BHV, log_decay_BHK, beta_BH))
        decay = decay.exp()
        new_BHV = beta[..., None] * (v - _read(before, k * decay))
        after = _written(before, decay, k, new_BHV, None)
        out = _read(after, q)
    return out.to(v_BHV.dtype), AffineState(after)


def _read(s_BHKV: torch.Tensor, x_BHK: torch.Tensor) -> torch.Tensor:
    return (x_BHK[..., None, :] @ s_BHKV)[..., 0, :]


def _written(
    s_BHKV: torch.Tensor,
    decay_BHK: torch.Tensor,
    k_BHK: torch.Tensor,
    v_BHV: torch.Tensor,
    taken: tuple[torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:
    """The state one token later, with what an erasure adds; written over the state before where `writes_in_place`."""
    out = s_BHKV if writes_in_place() else None
    s = torch.mul(s_BHKV, decay_BHK[..., None], out=out)
    for x_BHK, y_BHV in [(k_BHK, v_BHV)] + ([] if taken is None else [taken]):
        s = torch.addcmul(s, x_BHK[..., :, None], y_BHV[..., None, :], out=out)
    return s
