"""Relative attention over a sequence that is cut across ranks: one all-gather of kernel states and windows of values.

What a rank needs of the ranks before it is their `RelativeState`: the sum of phi(k) [v, 1]^T, the values still in the
window, and the sum of the values that left it. Bidirectional attention needs the same of the ranks after it, on the
mirrored sequence. Every sum is sent as it is needed; none is the difference of two others.
"""

import torch
import torch.nn.functional as F

from dist_attn.comm import Communicator
from dist_attn.comm import differentiable as collectives
from dist_attn.layout import SequenceLayout
from dist_attn.ops.relative_attention import WindowState
from dist_attn.ops.relative_attention.state import RelativeState
from dist_attn.ops.relative_attention.windowed import check_relative_shapes, numerators

__all__ = ["sharded_relative_attention"]


def sharded_relative_attention(
    comm: Communicator,
    layout: SequenceLayout,
    phi_q_BHLK: torch.Tensor,
    phi_k_BHLK: torch.Tensor,
    v_BHLV: torch.Tensor,
    phi_rp_HRK: torch.Tensor,
    *,
    causal: bool,
) -> torch.Tensor:
    """`ops.relative_attention` on this rank's slice; queries and keys lie on the same layout.

    Shapes: as `ops.relative_attention`, L local.
    Cost: one all-gather per rank of (M + k) (V + 1) elements per batch element and head when causal (k >= 1), of
        (M + 2 k) (V + 1) when not; its transpose backward. Independent of the length.
    Reference: Scaleformer, Eq. 9 to 11.
    """
    check_relative_shapes(phi_q_BHLK, phi_k_BHLK, v_BHLV, phi_rp_HRK)
    dtype = torch.promote_types(v_BHLV.dtype, torch.float32)
    q, k, rp_HRK = phi_q_BHLK.to(dtype), phi_k_BHLK.to(dtype), phi_rp_HRK.to(dtype)
    v1 = F.pad(v_BHLV.to(dtype), (0, 1), value=1.0)
    reach = rp_HRK.shape[1] // 2
    width = max(reach - 1, 0)
    with torch.autocast(k.device.type, enabled=False):
        own_BHMW = k.transpose(-1, -2) @ v1
    sent: list[torch.Tensor | WindowState] = [own_BHMW, WindowState.of(v1, width)]
    if not causal:
        sent.append(WindowState.of(v1.flip(2), width))
    parts = _gather(comm, sent)
    sums_P = [part[0] for part in parts]
    empty = WindowState.of(v1[:, :, :0], width)
    windows = _prefixes([_window(part[1], n) for part, n in zip(parts, layout.lengths, strict=True)], empty)
    before = _pick(windows, comm.rank)
    if causal:
        prefix_sums = [torch.zeros_like(sums_P[0])]
        for sum_BHMW in sums_P:
            prefix_sums.append(prefix_sums[-1] + sum_BHMW)
        # Stack, then pick, so that every rank's graph reaches the exchange.
        state = RelativeState(torch.stack(prefix_sums)[comm.rank], before)
        num = numerators(q, k, v1, rp_HRK[:, : reach + 1], own=True, before=state)
    else:
        mirrored = [_window(part[2], n) for part, n in zip(parts, layout.lengths, strict=True)]
        after = _pick(_prefixes(mirrored[::-1], empty), layout.size - 1 - comm.rank)
        with torch.autocast(q.device.type, enabled=False):
            num = q @ torch.stack(sums_P).sum(0)
        num = num + numerators(q, None, v1, rp_HRK[:, : reach + 1], own=True, before=before)
        rows_HRK = rp_HRK[:, reach:].flip(1)
        num = num + numerators(q.flip(2), None, v1.flip(2), rows_HRK, own=False, before=after).flip(2)
    return (num[..., :-1] / num[..., -1:]).to(v_BHLV.dtype)


def _gather(comm: Communicator, sent: list[torch.Tensor | WindowState]) -> list[list[torch.Tensor]]:
    """Everything in one message, rows [.., W] side by side: per rank the kernel sum, then [far; near] per window."""
    rows = [
        item if isinstance(item, torch.Tensor) else torch.cat([item.far_BHW[:, :, None], item.near_BHTW], dim=2)
        for item in sent
    ]
    gathered = collectives.all_gather(comm, torch.cat(rows, dim=2), label="carry")
    sizes = [part.shape[2] for part in rows]
    return [list(message.split(sizes, dim=2)) for message in gathered.unbind(0)]


def _window(rows_BHTW: torch.Tensor, length: int) -> WindowState:
    return WindowState(rows_BHTW[:, :, 0], rows_BHTW[:, :, 1:], length)


def _prefixes(windows: list[WindowState], empty: WindowState) -> list[WindowState]:
    prefixes = [empty]
    for window in windows:
        prefixes.append(prefixes[-1].combine(window))
    return prefixes


def _pick(windows: list[WindowState], index: int) -> WindowState:
    return WindowState(
        torch.stack([w.far_BHW for w in windows])[index],
        torch.stack([w.near_BHTW for w in windows])[index],
        windows[index].length,
    )
