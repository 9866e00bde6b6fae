"""Relative attention by GPU kernels: parallel over chunks, windows of values never in memory, sums in float32.

Forward: position scores, what every chunk of keys leaves behind, a scan of these, outputs. The backward pass makes them
again. A stream that goes on puts the values of its window, with keys of zeros, before its tokens.

Importing this module needs triton; `implementation.choose_relative` says whether a call can come here.
"""

from typing import Any

import torch
import torch.nn.functional as F

from dist_attn.ops.linear_attention.triton_forward import on_device
from dist_attn.ops.linear_attention.triton_tiles import Tiles, default_tiles
from dist_attn.ops.relative_attention.both_sides import numerators_of_all
from dist_attn.ops.relative_attention.causal import numerators
from dist_attn.ops.relative_attention.state import RelativeState, WindowState, check_relative_state, normalised
from dist_attn.ops.relative_attention.triton_launches import Given, Setting, relative_gradients, relative_outputs, walk
from dist_attn.ops.scan import plain_gradients

__all__ = ["triton_relative_attention", "triton_relative_attention_streaming"]


def triton_relative_attention(
    phi_q_BHLK: torch.Tensor,
    phi_k_BHSK: torch.Tensor,
    v_BHSV: torch.Tensor,
    phi_rp_HRK: torch.Tensor,
    *,
    causal: bool,
    tiles: Tiles | None = None,
) -> torch.Tensor:
    """`relative_attention` in its windowed form.

    Shapes: phi_q [B, H, L, K], phi_k [B, H, S, K], v [B, H, S, V], phi_rp [H, R, K] -> [B, H, L, V] in v's dtype.
    Cost: memory besides inputs and output 4 (K V / T + R) bytes per token and head for chunks of T = 64 tokens (32 in
        float32), half as much again for bfloat16.
    """
    queries, seen = phi_q_BHLK.shape[2], v_BHSV.shape[2]
    if causal:
        # Keys after the last query are never seen; queries after the last key find none there.
        seen = min(seen, queries)
        missing = (0, 0, 0, queries - seen)
        phi_k_BHSK, v_BHSV = F.pad(phi_k_BHSK[:, :, :seen], missing), F.pad(v_BHSV[:, :, :seen], missing)
    setting = _setting(phi_q_BHLK, v_BHSV, phi_rp_HRK, causal, tiles)
    nothing = _nothing(phi_k_BHSK, v_BHSV)
    ones = _ones(v_BHSV, seen)
    return _attend(setting, phi_q_BHLK, phi_k_BHSK, v_BHSV, phi_rp_HRK, nothing, nothing[:, :, 0], ones)[0]


def triton_relative_attention_streaming(
    phi_q_BHLK: torch.Tensor,
    phi_k_BHLK: torch.Tensor,
    v_BHLV: torch.Tensor,
    phi_rp_HRK: torch.Tensor,
    state: RelativeState | None,
    *,
    tiles: Tiles | None = None,
) -> tuple[torch.Tensor, RelativeState]:
    """`relative_attention_streaming` after a float32 state; the values of its window enter in v's dtype.

    Shapes and cost: as `triton_relative_attention`, and after a state a copy of the inputs with the window before them.
    Raises: ShapeError when the state is of another window.
    """
    reach, tokens = phi_rp_HRK.shape[1] // 2, v_BHLV.shape[2]
    setting = _setting(phi_q_BHLK, v_BHLV, phi_rp_HRK, True, tiles)
    q, k, v, ones = phi_q_BHLK, phi_k_BHLK, v_BHLV, _ones(v_BHLV, tokens)
    width, window = max(reach - 1, 0), _window(v_BHLV, max(reach - 1, 0))
    if state is None:
        nothing = _nothing(k, v)
        out, sz_BHMW = _attend(setting, q, k, v, phi_rp_HRK, nothing, nothing[:, :, 0], ones)
        return out, RelativeState(sz_BHMW, window)
    before = state.window
    check_relative_state(state, k, F.pad(v[:, :, :0], (0, 1)), reach)
    q, k = (F.pad(t, (0, 0, width, 0)) for t in (q, k))
    v = torch.cat([before.near_BHTW[..., :-1].to(v.dtype), v], dim=2)
    # Where the stream is shorter than the window, what stands before its first token is no key.
    ones = torch.cat([before.near_BHTW[..., -1].detach(), ones], dim=2)
    out, sz_BHMW = _attend(setting, q, k, v, phi_rp_HRK, state.sz_BHMW, before.far_BHW, ones)
    return out[:, :, width:], RelativeState(sz_BHMW, before.combine(window))


def _attend(
    setting: Setting,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rp_HRK: torch.Tensor,
    sz_BHMW: torch.Tensor,
    far_BHW: torch.Tensor,
    ones_BHS: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [B, H, L, V] and the sum [B, H, K, V + 1] after the last key."""
    rows = rp_HRK[:, : setting.reach + 1] if setting.causal else rp_HRK
    out, s, z = _Kernels.apply(  # type: ignore[no-untyped-call]
        setting, q, k, v, rows, sz_BHMW[..., :-1], sz_BHMW[..., -1], far_BHW, ones_BHS
    )
    return out, torch.cat([s, z[..., None]], dim=-1)


def _nothing(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The sum [B, H, K, V + 1] of no keys."""
    return torch.zeros((*k.shape[:2], k.shape[3], v.shape[3] + 1), device=v.device)


def _setting(q: torch.Tensor, v: torch.Tensor, rp: torch.Tensor, causal: bool, tiles: Tiles | None) -> Setting:
    size, values = q.shape[3], v.shape[3]
    tiles = tiles or default_tiles(size, size, values, v.dtype)
    return Setting(causal, rp.shape[1] // 2, tiles.fitted(size, size, values))


def _ones(v_BHLV: torch.Tensor, count: int) -> torch.Tensor:
    """[B, H, L]: 1 for the first `count` keys, 0 behind them."""
    ones = torch.zeros(v_BHLV.shape[:3], device=v_BHLV.device)
    ones[:, :, :count] = 1.0
    return ones


def _window(v_BHLV: torch.Tensor, width: int) -> WindowState:
    """`WindowState.of` these values with a ones column; only those that stay in the window are copied."""
    tokens = v_BHLV.shape[2]
    kept = min(tokens, width)
    far_BHW = F.pad(v_BHLV[:, :, : tokens - kept].sum(2, dtype=torch.float32), (0, 1), value=float(tokens - kept))
    near_BHTW = F.pad(v_BHLV[:, :, tokens - kept :].float(), (0, 1), value=1.0)
    return WindowState(far_BHW, F.pad(near_BHTW, (0, 0, width - kept, 0)), tokens)


class _Kernels(torch.autograd.Function):
    """(q, k, v, rows of rp, S, z, sum of far values, ones) -> outputs, S and z after the last key."""

    @staticmethod
    def forward(ctx: Any, setting: Setting, *tensors: torch.Tensor) -> Any:
        given = Given.of(setting, tensors)
        with on_device(given.v.device):
            found = walk(setting, given)
            out, den = relative_outputs(setting, given, found)
        ctx.setting = setting
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(*tensors, out, den)
        return out, found.s_end.view_as(tensors[4]), found.zm_end[:, :-1].view_as(tensors[5])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        *tensors, out, den = ctx.saved_tensors
        needs = ctx.needs_input_grad[1:]
        # Autograd turns gradients on inside backward if, and only if, this pass is to be differentiated in its turn.
        if torch.is_grad_enabled():
            return (None, *_composite(ctx.setting, tuple(tensors), needs, grads))
        given = Given.of(ctx.setting, tuple(tensors))
        with on_device(given.v.device):
            found = relative_gradients(ctx.setting, given, out, den, grads)
        return (None, *(g.to(t.dtype) if need else None for g, t, need in zip(found, tensors, needs, strict=True)))


def _composite(
    setting: Setting, tensors: tuple[torch.Tensor, ...], needs: tuple[bool, ...], grads: tuple[torch.Tensor, ...]
) -> list[torch.Tensor | None]:
    """The gradients of all inputs by the windowed form, as functions of the inputs and of `grads`."""
    # Aliases, so that gradients stop here and do not run on into what the inputs were computed from.
    inputs = tuple(t.view_as(t) if need else t for t, need in zip(tensors, needs, strict=True))
    q, k, v, rp, s, z, far, ones = (t.float() for t in inputs)
    v1 = torch.cat([v, ones[..., None]], dim=-1)
    sz = torch.cat([s, z[..., None]], dim=-1)
    sz_after = sz + k.transpose(-1, -2) @ v1
    if setting.causal:
        nothing = v1.new_zeros((*v1.shape[:2], max(setting.reach - 1, 0), v1.shape[3]))
        num = numerators(q, k, v1, rp, own=True, before=RelativeState(sz, WindowState(far, nothing, 0)))
    else:
        num = numerators_of_all(q, k, v1, rp)
    results = (normalised(num, inputs[2].dtype), sz_after[..., :-1], sz_after[..., -1])
    return plain_gradients(results, grads, inputs, needs)
