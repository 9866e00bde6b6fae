"""Long convolution across ranks: every rank takes all tokens of some channels, convolves, and gives them back."""

from itertools import pairwise

import torch

from dist_attn.comm import Communicator
from dist_attn.layout import SequenceLayout
from dist_attn.ops.long_convolution import check_kernels, packed_long_convolve
from dist_attn.sharded.reshuffle import column_cuts, columns_to_tokens, tokens_to_columns

__all__ = ["sharded_long_convolve"]


def sharded_long_convolve(
    comm: Communicator,
    layout: SequenceLayout,
    x_BLD: torch.Tensor,
    kernel_LD: torch.Tensor,
    *,
    backward_kernel_LD: torch.Tensor | None = None,
) -> torch.Tensor:
    """`ops.long_convolve` on this rank's slice; of every document by itself where the layout has some.

    Kernels are whole on every rank, their gradients this rank's share.

    Shapes: x [B, L local, D], kernels [K, D] -> [B, L local, D].
    Cost: two all-to-alls; a rank with D' of the D channels sends B L local (D - D') elements and then
        B (L - L local) D'.
    """
    check_kernels(x_BLD, kernel_LD, backward_kernel_LD)
    channels = x_BLD.shape[2]
    start, stop = tuple(pairwise(column_cuts(channels, comm.size)))[comm.rank]
    columns_CTB = tokens_to_columns(comm, layout, x_BLD.permute(2, 1, 0), label="long convolution")
    y_BTC = packed_long_convolve(
        columns_CTB.permute(2, 1, 0),
        kernel_LD[:, start:stop],
        backward_kernel_LD=None if backward_kernel_LD is None else backward_kernel_LD[:, start:stop],
        documents=layout.documents or (),
    )
    return columns_to_tokens(comm, layout, y_BTC.permute(2, 1, 0), channels, label="long convolution back").permute(
        2, 1, 0
    )
