"""Fourier mixing across ranks: features locally, then all tokens of some columns, then back.

The transform of a real row is Hermitian, so only D // 2 + 1 of its D columns travel; after the transform over the
sequence, column D - d is the mirror image (in the sequence) of column d.
"""

import math

import torch

from dist_attn.comm import Communicator
from dist_attn.layout import SequenceLayout
from dist_attn.ops.fourier import FourierNorm
from dist_attn.sharded.reshuffle import columns_to_tokens, tokens_to_columns

__all__ = ["sharded_fourier_mix"]


def sharded_fourier_mix(
    comm: Communicator, layout: SequenceLayout, x_BLD: torch.Tensor, *, norm: FourierNorm = None
) -> torch.Tensor:
    """`ops.fourier_mix` on this rank's slice.

    Shapes: x [B, L local, D] -> [B, L local, D].
    Cost: two all-to-alls; per rank and batch element (P - 1) / P of 2 L local (D // 2 + 1) elements each way.
    Reference: A Unified View of Long-Sequence Models, Sec. 6.2.
    """
    batch, length, size = x_BLD.shape
    wide = torch.promote_types(x_BLD.dtype, torch.float32)
    if not (batch and size and layout.total):
        return x_BLD.clone()
    half = size // 2 + 1
    if length:
        features_BLC2 = torch.view_as_real(torch.fft.rfft(x_BLD.to(wide), dim=2))
        rows_CLN = features_BLC2.permute(2, 1, 0, 3).flatten(2)
    else:
        # No tokens here, but the same graph as everybody: an empty slice must join the exchange backward too.
        rows_CLN = x_BLD.to(wide).permute(2, 1, 0)[:half].repeat(1, 1, 2)
    columns_CTN = tokens_to_columns(comm, layout, rows_CLN, label="fourier")
    columns_CTB = torch.view_as_complex(columns_CTN.unflatten(2, (batch, 2)).contiguous())
    mixed_CTB = torch.fft.fft(columns_CTB, dim=1).real if columns_CTB.shape[0] else columns_CTB.real
    # Re X[l, D - d] = Re X[-l mod L, d].
    mirrored_CTB = torch.roll(mixed_CTB.flip(1), 1, dims=1)
    both_CTN = torch.cat([mixed_CTB, mirrored_CTB], dim=2)
    back_CLN = columns_to_tokens(comm, layout, both_CTN, half, label="fourier back")
    low, high = back_CLN.split(batch, dim=2)
    # Columns 1 .. ceil(D / 2) - 1 have their mirror image at D - d, from the last column backwards.
    mixed_DLB = torch.cat([low, high[1 : (size + 1) // 2].flip(0)])
    scale = 1 / math.sqrt(size * layout.total) if norm == "ortho" else 1.0
    return (mixed_DLB.permute(2, 1, 0) * scale).to(x_BLD.dtype)
