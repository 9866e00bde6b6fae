"""Fourier mixing across ranks: features locally, then all tokens of some columns, then back.

The transform of a real row is Hermitian, so only D // 2 + 1 of its D columns travel; after the transform over the
sequence, column D - d is the mirror image (in the sequence) of column d.
"""

import torch

from dist_attn.comm import Communicator
from dist_attn.layout import SequenceLayout
from dist_attn.ops.documents import by_documents
from dist_attn.ops.fourier import FourierNorm, document_lengths
from dist_attn.sharded.reshuffle import columns_to_tokens, tokens_to_columns

__all__ = ["sharded_fourier_mix"]


def sharded_fourier_mix(
    comm: Communicator, layout: SequenceLayout, x_BLD: torch.Tensor, *, norm: FourierNorm = None
) -> torch.Tensor:
    """`ops.fourier_mix` on this rank's slice; of every document by itself where the layout has some.

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
    documents = layout.documents or ()
    both_CTN = (
        by_documents(columns_CTB, documents, _along) if columns_CTB.shape[0] else columns_CTB.real.repeat(1, 1, 2)
    )
    back_CLN = columns_to_tokens(comm, layout, both_CTN, half, label="fourier back")
    low, high = back_CLN.split(batch, dim=2)
    # Columns 1 .. ceil(D / 2) - 1 have their mirror image at D - d, from the last column backwards.
    mixed_DLB = torch.cat([low, high[1 : (size + 1) // 2].flip(0)])
    mixed_BLD = mixed_DLB.permute(2, 1, 0)
    if norm == "ortho":
        tokens_L = document_lengths(documents, layout.total, x_BLD.device)[slice(*layout.range(comm.rank))]
        mixed_BLD = mixed_BLD / (size * tokens_L.to(wide)).sqrt()[:, None]
    return mixed_BLD.to(x_BLD.dtype)


def _along(columns_CNTB: torch.Tensor) -> torch.Tensor:
    """The real part of the transform over T of each column, and beside it that of the column which mirrors it."""
    mixed_CNTB = torch.fft.fft(columns_CNTB, dim=2).real
    # Re X[l, D - d] = Re X[-l mod L, d].
    return torch.cat([mixed_CNTB, torch.roll(mixed_CNTB.flip(2), 1, dims=2)], dim=3)
