"""The functions of transformers that mix along the sequence, over `SequenceOps` and the states of a pass.

Names of parameters are those of transformers, which passes them by name. Sums are float32, as there.

Shape letters: B batch, L tokens, H heads, G key heads or groups, K key size, V values, C channels, N states, T taps.
"""

from typing import Any

import torch
import torch.nn.functional as F
from transformers.activations import ACT2FN

from dist_attn.adapters.passes import Pass
from dist_attn.errors import InputError
from dist_attn.ops import KeyValueCache, SoftmaxOptions
from dist_attn.ops.affine import AffineState
from dist_attn.ops.device import products_in
from dist_attn.ops.softmax_attention import CacheRows, CacheSlots, softmax_attention_of_rows, softmax_attention_of_slots

Tensor = torch.Tensor

_WITHOUT_EFFECT = {"dropout", "output_router_logits", "position_ids", "use_cache"}
"""What modules hand to attention that changes nothing here: dropout belongs to training."""


def attention(
    one: Pass,
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Causal softmax attention over the tokens so far: [B, H, L, K], [B, G, L, K], [B, G, L, V] -> [B, L, H, V].

    A sliding window limits them. Raises: InputError for attention that is not causal, a mask, or an unknown option.
    """
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    others |= {"attention_mask": attention_mask}
    unknown = [name for name, value in others.items() if value is not None and name not in _WITHOUT_EFFECT]
    if unknown or not causal:
        what = f"was given {', '.join(unknown)}" if unknown else "is not causal"
        raise InputError(f"attention of {type(module).__name__} {what}; only plain causal attention is bound")
    q, k, v = (one.own(t, 2) for t in (query, key, value))
    device = q.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        # Rotary positions leave queries and keys in float32.
        q, k, v = (t.to(torch.get_autocast_dtype(device)) for t in (q, k, v))
    cache = one.cache_before(k, v)
    after: KeyValueCache | CacheRows | CacheSlots
    options = SoftmaxOptions(scaling, sliding_window, softcap, s_aux)
    if isinstance(cache, tuple):
        out_BHLV, after = softmax_attention_of_rows(q, k, v, cache, options=options)
    elif isinstance(cache, CacheSlots):
        out_BHLV, after = softmax_attention_of_slots(q, k, v, cache, options=options)
    else:
        out_BHLV, after = one.ops.softmax_attention_streaming(
            q, k, v, cache, scale=scaling, window=sliding_window, softcap=softcap, sinks_H=s_aux
        )
    one.keep_cache(after, sliding_window)
    return one.filled(out_BHLV, 2).transpose(1, 2).contiguous(), None


def causal_conv1d(
    one: Pass,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> Tensor:
    """A convolution of each channel by itself, [B, C, L], with weights [C, T], a bias and an activation."""
    # Ours has the tap of the present first, transformers' that of the past.
    x_BLC, w_TC = one.own(hidden_states, 2).transpose(1, 2), weight.flip(1).t()
    # Products are summed in float32 and rounded once, as the kernels of transformers do; the inputs that are kept are
    # exact in their own precision.
    y_BLC, tail_BTC = one.ops.convolve_streaming(x_BLC.float(), w_TC.float(), one.tensor_before())
    one.keep(tail_BTC, x_BLC.dtype)
    y_BLC = y_BLC if bias is None else y_BLC + bias
    y_BLC = y_BLC if activation is None else ACT2FN[activation](y_BLC)
    return one.filled(y_BLC.to(hidden_states.dtype), 1).transpose(1, 2)


def delta_rule(
    one: Pass,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, None]:
    """The gated delta rule: q, k [B, L, G, K], v [B, L, H, V], g [B, L, H] or [B, L, H, K], beta [B, L, H]."""
    dtype, heads = query.dtype, value.shape[2]
    q, k, v, decay, beta = (one.own(t, 1).float() for t in (query, key, value, g, beta))
    if use_qk_l2norm_in_kernel:
        q, k = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + 1e-6) for t in (q, k))
    q, k = (_for_heads(t, heads) for t in (q, k))
    decay = decay[..., None] if decay.dim() == 3 else decay
    q, k, v, decay, beta = (t.transpose(1, 2) for t in (q * q.shape[-1] ** -0.5, k, v, decay, beta))
    return one.filled(recur(one, q, k, v, decay, beta, dtype=dtype).transpose(1, 2), 1).to(dtype), None


def mamba2_scan(
    one: Pass,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **_: Any,
) -> Tensor:
    """Mamba-2's scan: x [B, L, H, V], dt [B, L, H], A, D [H], keys and queries "B" and "C" [B, L, G, K]."""
    x, dt, keys, queries = (one.own(t, 1) for t in (hidden_states, dt, B, C))
    dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    dt = (F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit).float()
    dtype, x, heads = x.dtype, x.float(), x.shape[2]
    k, q = (_for_heads(t.float(), heads).transpose(1, 2) for t in (keys, queries))
    decay_BHL1 = (A.float() * dt).transpose(1, 2)[..., None]
    written_BHLV = (x * dt[..., None]).transpose(1, 2)
    out_BLHV = recur(one, q, k, written_BHLV, decay_BHL1, dtype=dtype).transpose(1, 2)
    out_BLHV = out_BLHV if D is None else out_BLHV + D[..., None] * x
    return one.filled(out_BLHV.contiguous(), 1)


def mamba_scan(
    one: Pass,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    **_: Any,
) -> Tensor:
    """Mamba's selective scan: x, dt, z [B, C, L], A [C, N], "B" and "C" [B, N, L], D [C]."""
    x, dt, b, c = (one.own(t, 2).transpose(1, 2) for t in (hidden_states, dt, B, C))
    dt = dt if delta_bias is None else dt + delta_bias.to(dt.dtype)
    dt = F.softplus(dt) if delta_softplus else dt
    y_BLC, after = one.ops.selective_scan(x, dt, A, b, c, skip_D=D, state=one.tensor_before())
    one.keep(after)
    y_BCL = one.filled(y_BLC, 1).transpose(1, 2)
    return y_BCL if z is None else y_BCL * F.silu(z)


def recur(
    one: Pass,
    q_BHLK: Tensor,
    k_BHLK: Tensor,
    v_BHLV: Tensor,
    log_decay: Tensor,
    beta_BHL: Tensor | None = None,
    *,
    dtype: torch.dtype,
) -> Tensor:
    """An affine recurrence, [B, H, L, V], or with `beta` the gated delta rule; log decays [B, H, L, 1] or [.., K].

    `dtype` is that of the model: a GPU's kernels multiply in it, as those of transformers do.
    """
    before = one.tensor_before()
    state = None if before is None else AffineState(before)
    with products_in(dtype, q_BHLK.device):
        if beta_BHL is None:
            out_BHLV, after = one.ops.affine_recurrence(q_BHLK, k_BHLK, v_BHLV, log_decay_BHLK=log_decay, state=state)
        else:
            out_BHLV, after = one.ops.gated_delta_rule(
                q_BHLK, k_BHLK, v_BHLV, beta_BHL=beta_BHL, log_decay_BHLK=log_decay, state=state
            )
    one.keep(after.s_BHKV)
    return out_BHLV


def _for_heads(x_BLGK: Tensor, heads: int) -> Tensor:
    """Repeat what groups of heads share for each of their heads; that of a single group is not copied."""
    groups = x_BLGK.shape[2]
    return x_BLGK.expand(-1, -1, heads, -1) if groups == 1 else x_BLGK.repeat_interleave(heads // groups, dim=2)


def no_answer(one: Pass, *_: Any, **__: Any) -> None:
    """Leave a fused function out, as transformers does where its package is missing."""


def load_balance(
    one: Pass,
    gate_logits: tuple[Tensor, ...] | None,
    num_experts: int,
    top_k: int = 2,
    attention_mask: Tensor | None = None,
) -> Tensor | int:
    """The loss of experts that tokens choose unevenly, over the tokens of all layers and all ranks.

    Shapes: the router's logits of each layer [B L, E] -> a number.
    Cost: one all-reduce of 2 B E numbers.
    """
    if not isinstance(gate_logits, tuple):
        return 0
    chosen_and_likely: list[Tensor] = []
    for logits_NE in gate_logits:
        likely_NE = logits_NE.softmax(dim=-1).float()
        chosen_NE = F.one_hot(likely_NE.topk(top_k, dim=-1).indices, num_experts).sum(1).float()
        chosen_and_likely.append(torch.cat([chosen_NE, likely_NE], dim=-1))
    sums_NX = torch.stack(chosen_and_likely).sum(0)
    batch = sums_NX.shape[0] // max(1, one.length)
    total_X = one.ops.sum_over_sequence(one.own(sums_NX.unflatten(0, (batch, -1)), 1)).sum(0)
    rows = len(gate_logits) * batch * one.ops.total_length(one.length)
    chosen_E, likely_E = (total_X / rows).chunk(2)
    balance: Tensor = num_experts * (chosen_E * likely_E).sum()
    return balance
