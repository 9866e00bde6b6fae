"""Exact softmax attention: PyTorch's fused kernels for whole sequences and documents, our tiles for any placement.

Shape letters: B batch, H query heads, G key heads, L queries, S keys, K head size, V values, R rows of relative
positions, T tokens of a few documents.
"""

import math
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F

from dist_attn.ops.documents import (
    check_documents,
    document_groups,
    document_numbers,
    same_document,
    split_tokens,
    start_flags,
)
from dist_attn.ops.linear_attention.call import check_prefix
from dist_attn.ops.sequence_call import local_form
from dist_attn.ops.softmax_attention.call import QueryPlacement, RelativePositions, SoftmaxCall, SoftmaxOptions
from dist_attn.ops.softmax_attention.tiled import attend_partially, merge_partials, with_sinks

# On CPUs torch's fused kernel goes backward through short half-precision sequences up to 10 times more slowly than
# through the same in float32: 190 against 21 ms at 128 x 8 heads of 16 tokens; even at about 200 tokens.
WIDE_TOKENS = 128
# The tokens of whole documents that share one masked score matrix. On CPUs calls cost less than scores that are hidden:
# 4 ms in place of 9 for 64 sentences of 16 tokens and 12 heads of size 32, forward alone; 14 for 25 with gradients.
TOGETHER_TOKENS_CPU = 64
TOGETHER_TOKENS = 256


def softmax_attention(
    q_BHLK: torch.Tensor,
    k_BGSK: torch.Tensor,
    v_BGSV: torch.Tensor,
    *,
    causal: bool,
    scale: float | None = None,
    placement: QueryPlacement | None = None,
    prefix: int = 0,
    relative: RelativePositions | None = None,
) -> torch.Tensor:
    """softmax(scale q k^T) v, exact; scale defaults to K^-1/2. G key heads serve H query heads (G divides H).

    Causal is aligned at the top left: query t sees keys <= t, also when L != S. With a placement, positions and
    documents decide instead; queries that see no key give zeros. With a `prefix` the first so many tokens see each
    other fully and the rest is causal (prefix-LM). With `relative` positions keys and values depend on how far they
    stand from the query (Shaw); that is computed by tiles, of which one is held at a time, and once differentiable.
    Shapes: q [B, H, L, K], k [B, G, S, K], v [B, G, S, V] -> [B, H, L, V].
    Memory: linear in L and S; where K and V differ, copies of the smaller as wide as the larger.
    Raises: ShapeError when shapes do not fit together; InputError for a prefix where attention is not causal, or with a
        placement.
    Reference: Random Feature Attention, Eq. 1; Shaw et al. 2018, Eq. 3 and 4 (relative positions).
    """
    return attend_exactly(
        SoftmaxCall(q_BHLK, k_BGSK, v_BGSV, causal, SoftmaxOptions(scale, relative=relative), placement, prefix)
    )


def softmax_attention_naive(
    q_BHLK: torch.Tensor,
    k_BGSK: torch.Tensor,
    v_BGSV: torch.Tensor,
    *,
    causal: bool,
    scale: float | None = None,
    placement: QueryPlacement | None = None,
    prefix: int = 0,
    window: int | None = None,
    softcap: float | None = None,
    sinks_H: torch.Tensor | None = None,
    relative: RelativePositions | None = None,
) -> torch.Tensor:
    """The oracle of softmax attention: the score matrix in memory; see `softmax_attention` and `SoftmaxOptions`."""
    repeats = q_BHLK.shape[1] // k_BGSK.shape[1]
    k_BHSK, v_BHSV = k_BGSK.repeat_interleave(repeats, 1), v_BGSV.repeat_interleave(repeats, 1)
    scores_BHLS = q_BHLK @ k_BHSK.transpose(-1, -2) * (1 / math.sqrt(q_BHLK.shape[3]) if scale is None else scale)
    where = QueryPlacement.in_order(q_BHLK.shape[2], k_BGSK.shape[2]) if placement is None else placement
    where = where.on(q_BHLK.device)
    if relative is not None:
        row_LS = (where.keys_S - where.queries_L[:, None]).clamp(-relative.reach, relative.reach) + relative.reach
        near_BHLS = (q_BHLK[:, :, :, None] * relative.keys_HRK[:, row_LS]).sum(-1)
        scores_BHLS = scores_BHLS + near_BHLS * (1 / math.sqrt(q_BHLK.shape[3]) if scale is None else scale)
    if softcap is not None:
        scores_BHLS = softcap * torch.tanh(scores_BHLS / softcap)
    hidden_LS = where.hidden(causal=causal)
    hidden_LS[:prefix, :prefix] = False
    if window is not None:
        hidden_LS |= where.keys_S <= where.queries_L[:, None] - window
    # Queries that see nothing: any finite scores do, since their weights are set to zero.
    blind_L1 = hidden_LS.all(dim=-1, keepdim=True)
    scores_BHLS = scores_BHLS.masked_fill(hidden_LS & ~blind_L1, float("-inf"))
    if sinks_H is not None:
        sinks_BHL1 = sinks_H[:, None, None].expand(*scores_BHLS.shape[:3], 1)
        scores_BHLS = torch.cat([scores_BHLS, sinks_BHL1], dim=-1)
    weights_BHLS = scores_BHLS.softmax(dim=-1)[..., : k_BGSK.shape[2]].masked_fill(blind_L1, 0.0)
    out_BHLV = weights_BHLS @ v_BHSV
    if relative is not None and relative.values_HRV is not None:
        out_BHLV = out_BHLV + (weights_BHLS[..., None] * relative.values_HRV[:, row_LS]).sum(dim=3)
    return out_BHLV


def attend_exactly(call: SoftmaxCall) -> torch.Tensor:
    """`softmax_attention` of a call.

    Raises: as `softmax_attention`.
    """
    call.check()
    if call.prefix:
        first = attend_exactly(replace(call.tokens(0, call.prefix), causal=False))
        # Rows of the prefix are computed in vain; cutting them off before would take the fused kernel's alignment away.
        rest = attend_exactly(replace(call, prefix=0))[:, :, call.prefix :]
        return torch.cat([first, rest], dim=2)
    if call.needs_tiles:
        return with_sinks(attend_partially(call), call.options.sinks_H).to(call.v_BGSV.dtype)
    if not call.queries:
        return call.q_BHLK.new_zeros(call.output_shape)
    return _fused(call)


@local_form(SoftmaxCall)
def attend_within_documents(call: SoftmaxCall) -> torch.Tensor:
    """`softmax_attention` of a call, of each document by itself if the call has some."""
    if call.documents:
        check_prefix(call.prefix, causal=call.causal, documents=True)
        return attend_documents(call, call.documents)
    return attend_exactly(call)


def attend_documents(call: SoftmaxCall, documents: tuple[int, ...]) -> torch.Tensor:
    """`softmax_attention` in which every document attends to itself alone: several short ones at a time.

    Shapes: q [B, H, L, K], k [B, G, L, K], v [B, G, L, V] -> [B, H, L, V].
    Cost: one call of a fused kernel per `TOGETHER_TOKENS` (on CPUs `TOGETHER_TOKENS_CPU`) of short documents and per
        longer document; with relative positions the tiles that touch a document.
    Raises: ShapeError when shapes do not fit together.
    """
    call.check()
    length = call.queries
    check_documents(documents, length, call.keys)
    if call.needs_tiles:
        tokens_L, number_L = torch.arange(length, device="cpu"), document_numbers(documents, length)
        return attend_exactly(replace(call, placement=QueryPlacement(tokens_L, tokens_L, number_L, number_L)))
    flags_L = start_flags(documents, length, call.q_BHLK.device)
    starts = frozenset(documents)
    outputs = []
    together = TOGETHER_TOKENS_CPU if call.q_BHLK.device.type == "cpu" else TOGETHER_TOKENS
    groups = document_groups(documents, length, together)
    for (start, stop), (q, k, v) in zip(groups, split_tokens(call.qkv, groups), strict=True):
        assert q is not None and k is not None and v is not None
        if starts.isdisjoint(range(start + 1, stop)):
            outputs.append(attend_exactly(call.with_qkv(q, k, v)))
            continue
        seen_TT = same_document(flags_L[start:stop])
        seen_TT = seen_TT.tril() if call.causal else seen_TT
        q, k, v = for_kernel(q, k, v, q.device, masked=True)
        attended = F.scaled_dot_product_attention(
            q, k, v, attn_mask=seen_TT, scale=call.score_scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        outputs.append(attended[..., : call.output_shape[3]])
    if not outputs:
        # No tokens, but of the inputs' graph: an empty rank's backward pass must find its way too.
        return call.v_BGSV.new_zeros(call.output_shape) + sum(t.sum() for t in call.qkv)
    return torch.cat(outputs, dim=2)


def _fused(call: SoftmaxCall) -> torch.Tensor:
    """Attention of a whole sequence by torch's own kernels."""
    if call.causal and call.queries != call.keys:
        return _fused_of_unequal(call)
    values = call.v_BGSV.shape[3]
    q, k, v = for_kernel(*call.qkv, call.q_BHLK.device)
    attention = partial(
        F.scaled_dot_product_attention,
        is_causal=call.causal,
        scale=call.score_scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    if not _is_slow_backward(q, k, v):
        return attention(q, k, v)[..., :values]
    with torch.autocast("cpu", enabled=False):
        return attention(q.float(), k.float(), v.float())[..., :values].to(call.v_BGSV.dtype)


def _fused_of_unequal(call: SoftmaxCall) -> torch.Tensor:
    """Causal attention where there are more keys or more queries: equally many, then the queries that see all keys.

    torch aligns such masks at the top left by its documentation; what its kernels do has differed.
    """
    shared = min(call.queries, call.keys)
    parts = [_fused(call.tokens(0, shared))] if shared else []
    if call.queries > shared:
        q, k, v = call.qkv
        parts.append(_fused(replace(call.with_qkv(q[:, :, shared:], k, v), causal=False)))
    return torch.cat(parts, dim=2)


def attend_after(call: SoftmaxCall, k_BGPK: torch.Tensor, v_BGPV: torch.Tensor) -> torch.Tensor | None:
    """Causal attention of tokens in order that see P keys before them too, by torch's fused kernel for CPUs.

    Once over the keys before them and once over their own; None for what that kernel does not compute. Tiles
    were three quarters of the time that a prompt of 2,048 tokens took (9 heads of 64, 30 layers, bfloat16).
    """
    options, tensors = call.options, (*call.qkv, k_BGPK, v_BGPV)
    narrow = options.window is not None and options.window < call.keys + k_BGPK.shape[2]
    if narrow or options.softcap is not None or options.relative is not None or not call.causal:
        return None
    plain = {(t.device.type, t.dtype, t.shape[3]) for t in tensors} == {("cpu", call.q_BHLK.dtype, tensors[0].shape[3])}
    halves = call.q_BHLK.dtype in (torch.float32, torch.bfloat16)
    if not plain or not halves or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return None
    kernel = partial(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu, scale=call.score_scale)
    q, k, v = call.qkv
    parts = kernel(q, k_BGPK, v_BGPV), kernel(q, k, v, is_causal=True)
    merged = merge_partials([out.float() for out, _ in parts], [lse for _, lse in parts])
    return with_sinks(merged, options.sinks_H).to(v.dtype)


def for_kernel(
    q_BHLK: torch.Tensor, k_BGSK: torch.Tensor, v_BGSV: torch.Tensor, device: torch.device, *, masked: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Prepare the same attention with zeros and copies, where torch would else hold all scores on this device.

    Keys and values need one size, which GPUs want to be a multiple of 8. In float32 or with a mask GPUs have no kernel
    for groups of query heads. What is as wide already is not padded, because that copies it.
    """
    on_cpu = device.type == "cpu"
    width = max(q_BHLK.shape[3], v_BGSV.shape[3])
    if not on_cpu:
        width = -(-width // 8) * 8
    q, k, v = (F.pad(t, (0, width - t.shape[3])) if t.shape[3] < width else t for t in (q_BHLK, k_BGSK, v_BGSV))
    groups = q.shape[1] // k.shape[1]
    if not on_cpu and groups > 1 and (masked or q.dtype not in (torch.bfloat16, torch.float16)):
        k, v = (t.repeat_interleave(groups, dim=1) for t in (k, v))
    return q, k, v


def _is_slow_backward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Return whether a backward pass is to come that takes longer in the precision given than in float32."""
    short_halves = v.dtype in (torch.bfloat16, torch.float16) and max(q.shape[2], k.shape[2]) <= WIDE_TOKENS
    on_cpu = v.device.type == "cpu" and q.dtype == k.dtype == v.dtype
    return short_halves and on_cpu and torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))
