"""Relative attention by GPU kernels: parallel over chunks, windows of values never in memory, sums in float32.

Forward: position scores, what every chunk of keys leaves behind, a scan of these, outputs. The backward pass makes them
again. A stream that goes on puts the values of its window, with keys of zeros, before its tokens.

Importing this module needs triton; `call.choose_relative` says whether a call can come here.

Shape letters: B batch, H heads, L queries, S keys, K features, V values, W = V + 1 (v and a ones column), R rows of
relative positions, T tokens of a window or a chunk.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from dist_attn.ops.kernel_operation import KernelOperation, Tensors, present
from dist_attn.ops.linear_attention.triton_forward import on_device
from dist_attn.ops.linear_attention.triton_tiles import Tiles, default_tiles, generation_of
from dist_attn_papers.ops.relative_attention.call import RelativeCall
from dist_attn_papers.ops.relative_attention.numerators import numerators, numerators_of_all
from dist_attn_papers.ops.relative_attention.state import RelativeState, WindowState, normalised
from dist_attn_papers.ops.relative_attention.triton_launches import (
    KernelInputs,
    RelativeTensors,
    Setting,
    relative_gradients,
    relative_outputs,
    walk,
    window_tiles,
)


def triton_relative_attention(call: RelativeCall, *, tiles: Tiles | None = None) -> torch.Tensor:
    """`relative_attention` of a call in the windowed form, without a state.

    Shapes: phi_q [B, H, L, K], phi_k [B, H, S, K], v [B, H, S, V], phi_rp [H, R, K] -> [B, H, L, V] in v's dtype.
    Cost: memory besides inputs and output 4 (K V / T + R) bytes per token and head for chunks of T = 64 tokens (32 in
        float32), half as much again for bfloat16.
    """
    q, k, v, _ = call.tensors
    seen = call.keys
    if call.causal:
        # Keys after the last query are never seen; queries after the last key find none there.
        seen = min(seen, call.queries)
        missing = (0, 0, 0, call.queries - seen)
        k, v = (F.pad(t[:, :, :seen], missing) for t in (k, v))
    return _attend(call.with_qkv(q, k, v), None, _ones(v, seen), tiles)[0]


def triton_relative_attention_streaming(
    call: RelativeCall, *, tiles: Tiles | None = None
) -> tuple[torch.Tensor, RelativeState]:
    """`relative_attention_streaming` after a float32 state; the values of its window enter in v's dtype.

    Shapes and cost: as `triton_relative_attention`, and after a state a copy of the inputs with the window before them.
    """
    (q, k, v, _), state, width = call.tensors, call.state, call.width
    ones, window = _ones(v, call.keys), _window(v, width)
    if state is None:
        out, sz_BHMW = _attend(call, None, ones, tiles)
        return out, RelativeState(sz_BHMW, window)
    before = state.window
    q, k = (F.pad(t, (0, 0, width, 0)) for t in (q, k))
    v = torch.cat([before.near_BHTW[..., :-1].to(v.dtype), v], dim=2)
    # Where the stream is shorter than the window, what stands before its first token is no key.
    ones = torch.cat([before.near_BHTW[..., -1].detach(), ones], dim=2)
    out, sz_BHMW = _attend(call.with_qkv(q, k, v), state, ones, tiles)
    return out[:, :, width:], RelativeState(sz_BHMW, before.combine(window))


def _attend(
    call: RelativeCall, state: RelativeState | None, ones_BHS: torch.Tensor, tiles: Tiles | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [B, H, L, V] and the sum [B, H, K, V + 1] after the last key; of the state's window only the far sum."""
    q, k, v, rp_HRK = call.tensors
    size, values = q.shape[3], v.shape[3]
    tiles = tiles or window_tiles(default_tiles(size, size, values, v.dtype, generation_of(v.device)))
    setting = Setting(call.causal, call.reach, tiles.fitted(size, values))
    if state is None:
        nothing = k[:, :, :0].detach().float(), F.pad(v[:, :, :0].detach().float(), (0, 1))
        state = RelativeState.of(*nothing, 0)
    sz_BHMW, far_BHW = state.sz_BHMW, state.window.far_BHW
    rows = rp_HRK[:, : call.reach + 1] if call.causal else rp_HRK
    inputs = RelativeTensors(q, k, v, rows, sz_BHMW[..., :-1], sz_BHMW[..., -1], far_BHW, ones_BHS)
    out, s, z = map(present, _RelativeKernels(setting)(inputs))
    return out, torch.cat([s, z[..., None]], dim=-1)


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


@dataclass(frozen=True)
class _RelativeKernels(KernelOperation[RelativeTensors]):
    """Outputs, and S and z after the last key."""

    setting: Setting

    def forward(self, x: RelativeTensors, *, keep: bool) -> tuple[Tensors, Tensors]:
        inputs = KernelInputs.of(self.setting, x)
        with on_device(x.v.device):
            walked = walk(inputs)
            # Gradients of position scores are sums over keys that nearly cancel: what rounds an output would be left.
            out, den = relative_outputs(inputs, walked, torch.float32 if keep else x.v.dtype)
        return (out.to(x.v.dtype), walked.end.s.view_as(x.s), walked.end.zm[:, :-1].view_as(x.z)), (out, den)

    def backward(self, x: RelativeTensors, needs: RelativeTensors, grads: Tensors, kept: Tensors) -> RelativeTensors:
        inputs = KernelInputs.of(self.setting, x)
        out, den = map(present, kept)
        with on_device(x.v.device):
            return relative_gradients(inputs, out, den, *map(present, grads)).like(x, needs)

    def replay(self, x: RelativeTensors) -> Tensors:
        q, k, v, rp, s, z, far, ones = (t.float() for t in x)
        v1, sz = torch.cat([v, ones[..., None]], dim=-1), torch.cat([s, z[..., None]], dim=-1)
        sz_after = sz + k.transpose(-1, -2) @ v1
        if self.setting.causal:
            nothing = v1.new_zeros((*v1.shape[:2], max(self.setting.reach - 1, 0), v1.shape[3]))
            num = numerators(q, k, v1, rp, own=True, before=RelativeState(sz, WindowState(far, nothing, 0)))
        else:
            num = numerators_of_all(q, k, v1, rp)
        return normalised(num, x.v.dtype), sz_after[..., :-1], sz_after[..., -1]
