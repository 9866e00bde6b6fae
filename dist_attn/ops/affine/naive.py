"""Affine recurrences token by token: the oracle of every other form."""

import torch

from dist_attn.ops.affine.call import Read
from dist_attn.ops.affine.state import AffineState


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
    """S_t = (diag(exp g_t) + a_t b_t^T) S_{t-1} + k_t v_t^T, o_t = q_t^T S_t; see `affine_recurrence`."""
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
    """S' = diag(exp g_t) S_{t-1}, S_t = S' + beta_t k_t (v_t - k_t^T S')^T, o_t = q_t^T S_t."""
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
