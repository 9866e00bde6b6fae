"""Exact softmax attention: PyTorch's fused kernels for whole sequences, our tiles for slices in any placement."""

import torch
import torch.nn.functional as F

from dist_attn.ops.linear_attention.call import check_prefix
from dist_attn.ops.softmax_attention.placement import Placement
from dist_attn.ops.softmax_attention.relative import RelativePositions
from dist_attn.ops.softmax_attention.shapes import check_softmax_shapes
from dist_attn.ops.softmax_attention.tiled import softmax_attention_partial

__all__ = ["softmax_attention"]

# On CPUs torch's fused kernel goes backward through short half-precision sequences up to 10 times more slowly than
# through the same in float32: 190 against 21 ms at 128 x 8 heads of 16 tokens; even at about 200 tokens.
WIDE_TOKENS = 128


def softmax_attention(
    q_BHLK: torch.Tensor,
    k_BGSK: torch.Tensor,
    v_BGSV: torch.Tensor,
    *,
    causal: bool,
    scale: float | None = None,
    placement: Placement | None = None,
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
    check_softmax_shapes(q_BHLK, k_BGSK, v_BGSV)
    check_prefix(prefix, causal=causal, documents=placement is not None)
    if prefix:
        parts = (t[:, :, :prefix] for t in (q_BHLK, k_BGSK, v_BGSV))
        first = softmax_attention(*parts, causal=False, scale=scale, relative=relative)
        # Rows of the prefix are computed in vain; cutting them off before would take the fused kernel's alignment away.
        rest = softmax_attention(q_BHLK, k_BGSK, v_BGSV, causal=True, scale=scale, relative=relative)[:, :, prefix:]
        return torch.cat([first, rest], dim=2)
    if placement is not None or relative is not None:
        out_BHLV, _ = softmax_attention_partial(
            q_BHLK, k_BGSK, v_BGSV, causal=causal, scale=scale, placement=placement, relative=relative
        )
        return out_BHLV.to(v_BGSV.dtype)
    if not q_BHLK.shape[2]:
        return q_BHLK.new_zeros((*q_BHLK.shape[:3], v_BGSV.shape[3]))
    heads, groups, size, values = q_BHLK.shape[1], k_BGSK.shape[1], q_BHLK.shape[3], v_BGSV.shape[3]
    # Where keys and values differ in size torch takes a form that holds all scores; zeros make them equal. What is as
    # wide already is not padded, because that copies it.
    missing = (max(size, values) - t.shape[3] for t in (q_BHLK, k_BGSK, v_BGSV))
    q, k, v = (F.pad(t, (0, n)) if n else t for t, n in zip((q_BHLK, k_BGSK, v_BGSV), missing, strict=True))
    scale = size**-0.5 if scale is None else scale
    if not _is_slow_backward(q, k, v):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=heads != groups)
        return out[..., :values]
    with torch.autocast("cpu", enabled=False):
        q, k, v = q.float(), k.float(), v.float()
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=heads != groups)
    return out[..., :values].to(v_BGSV.dtype)


def _is_slow_backward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether a backward pass is to come that takes longer in the precision given than in float32."""
    short_halves = v.dtype in (torch.bfloat16, torch.float16) and max(q.shape[2], k.shape[2]) <= WIDE_TOKENS
    on_cpu = v.device.type == "cpu" and q.dtype == k.dtype == v.dtype
    return short_halves and on_cpu and torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))
