"""The tokens just outside a rank's slice, which a short convolution needs."""

import torch
import torch.nn.functional as F

from dist_attn.comm import Communicator
from dist_attn.comm import differentiable as collectives
from dist_attn.layout import SequenceLayout
from dist_attn.ops.convolution import check_taps, convolve_padded, tail_of

__all__ = ["sharded_convolve", "sharded_convolve_streaming"]


def sharded_convolve_streaming(
    comm: Communicator,
    layout: SequenceLayout,
    x_BLD: torch.Tensor,
    w_KD: torch.Tensor,
    tail_BKD: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`ops.convolve_streaming` on this rank's slice; the tail before the first and after the last global token.

    Cost: one all-gather of (K - 1) B D elements per rank; none for K = 1.
    """
    check_taps(x_BLD, w_KD)
    keep = w_KD.shape[0] - 1
    before, after = _left_contexts(comm, layout, x_BLD, tail_of(x_BLD, keep, tail_BKD))
    return convolve_padded(torch.cat([before, x_BLD], dim=1), w_KD), after


def sharded_convolve(
    comm: Communicator, layout: SequenceLayout, x_BLD: torch.Tensor, w_KD: torch.Tensor, *, centred: bool = False
) -> torch.Tensor:
    """`ops.convolve` on this rank's slice.

    Cost: one all-gather of (K - 1) B D elements per rank, two with the same sum when centred; none for K = 1.
    """
    check_taps(x_BLD, w_KD)
    ahead = w_KD.shape[0] // 2 if centred else 0
    behind = w_KD.shape[0] - 1 - ahead
    zeros = x_BLD.new_zeros((x_BLD.shape[0], behind + ahead, x_BLD.shape[2]))
    before, _ = _left_contexts(comm, layout, x_BLD, zeros[:, :behind])
    # What follows a slice is what precedes it in the mirrored sequence of mirrored ranks.
    after = _right_context(comm, layout, x_BLD, zeros[:, :ahead])
    return convolve_padded(torch.cat([before, x_BLD, after], dim=1), w_KD)


def _left_contexts(
    comm: Communicator, layout: SequenceLayout, x_BLD: torch.Tensor, tail_BKD: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The last K - 1 tokens before this rank's slice, and those at the end of the sequence."""
    keep = tail_BKD.shape[1]
    if not keep:
        return tail_BKD, tail_BKD
    known = min(x_BLD.shape[1], keep)
    mine = F.pad(x_BLD[:, x_BLD.shape[1] - known :], (0, 0, keep - known, 0))
    edges_P = collectives.all_gather(comm, mine, label="halo").unbind(0)
    contexts = [tail_BKD]
    for edge_BKD, length in zip(edges_P, layout.lengths, strict=True):
        known = min(length, keep)
        # A slice shorter than the halo leaves older tokens in it, so a halo may span several ranks.
        contexts.append(torch.cat([contexts[-1][:, known:], edge_BKD[:, keep - known :]], dim=1))
    # The last context is a tensor of its own, which a state may hold on to without the others; every rank's graph
    # reaches the exchange through it. Stack, then pick: rank 0's own context alone would not.
    return torch.stack(contexts)[comm.rank], contexts[-1]


def _right_context(
    comm: Communicator, layout: SequenceLayout, x_BLD: torch.Tensor, zeros_BKD: torch.Tensor
) -> torch.Tensor:
    """The first tokens after this rank's slice; zeros behind the end of the sequence."""
    keep = zeros_BKD.shape[1]
    if not keep:
        return zeros_BKD
    known = min(x_BLD.shape[1], keep)
    mine = F.pad(x_BLD[:, :known], (0, 0, 0, keep - known))
    edges_P = collectives.all_gather(comm, mine, label="halo").unbind(0)
    contexts = [zeros_BKD]
    for edge_BKD, length in zip(reversed(edges_P), reversed(layout.lengths), strict=True):
        known = min(length, keep)
        contexts.append(torch.cat([edge_BKD[:, :known], contexts[-1][:, : keep - known]], dim=1))
    return torch.stack(contexts)[layout.size - 1 - comm.rank]
