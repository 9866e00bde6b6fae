"""Fourier token mixing (FNet) by the fast transform, any length; packed documents of a length share one transform.

Over ranks features are transformed locally first. The transform of a real row is Hermitian, so only D // 2 + 1 of its D
columns travel; after the transform over the sequence, column D - d is the mirror image (in the sequence) of column d.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import torch

from dist_attn.comm import Communicator
from dist_attn.errors import ShapeError
from dist_attn.layout import SequenceLayout
from dist_attn.ops import LocalSequenceOps, SequenceOps
from dist_attn.ops.device import send
from dist_attn.ops.documents import check_documents, document_ranges
from dist_attn.ops.sequence_call import SequenceCall, local_form
from dist_attn.sharded import Sharding, over_ranks
from dist_attn_papers.ops.columns import apart, by_documents, columns_to_tokens, tokens_to_columns

FourierNorm = Literal["ortho"] | None


def fourier_mix(x_BLD: torch.Tensor, *, norm: FourierNorm = None, ops: SequenceOps | None = None) -> torch.Tensor:
    """The real part of the Fourier transform over sequence and features, unnormalised or unitary ("ortho").

    Of packed documents that of every document by itself.

    Shapes: x [B, L, D] -> [B, L, D]; half-precision inputs are transformed in float32.
    Cost: one transform per length of document that occurs, at most sqrt(2 L) of them.
    Raises: ShapeError for another number of dimensions.
    Reference: A Unified View of Long-Sequence Models, Sec. 6.2 (FNet); the code of FNet is unnormalised.
    """
    return (LocalSequenceOps() if ops is None else ops).run(FourierCall(x_BLD, norm))


def mix_whole(
    x_BLD: torch.Tensor, *, norm: FourierNorm = None, documents: tuple[int, ...] | None = None
) -> torch.Tensor:
    """`fourier_mix` of a sequence that lies whole in this process; tokens before the first document are one."""
    if x_BLD.dim() != 3:
        raise ShapeError(f"x has shape {tuple(x_BLD.shape)}; needed is [B, L, D]")
    check_documents(documents or (), x_BLD.shape[1])
    if not x_BLD.numel():
        return x_BLD.clone()
    if documents:

        def mix(rows_BNTD: torch.Tensor) -> torch.Tensor:
            return mix_whole(rows_BNTD.flatten(0, 1), norm=norm).reshape(rows_BNTD.shape)

        return by_documents(x_BLD, documents, mix)
    wide = torch.promote_types(x_BLD.dtype, torch.float32)
    mixed_BLD: torch.Tensor = torch.fft.fft2(x_BLD.to(wide), dim=(1, 2), norm=norm).real
    return mixed_BLD.to(x_BLD.dtype)


@dataclass(frozen=True)
class FourierCall(SequenceCall[torch.Tensor]):
    """The arguments of `fourier_mix`, which explains them."""

    x_BLD: torch.Tensor
    norm: FourierNorm = None

    operation: ClassVar[str] = "fourier_mix"
    along: ClassVar[tuple[str, ...]] = ("x_BLD",)


@local_form(FourierCall)
def mix_fourier(call: FourierCall) -> torch.Tensor:
    """`fourier_mix` of a call."""
    return mix_whole(call.x_BLD, norm=call.norm, documents=call.documents)


def document_lengths(documents: tuple[int, ...], length: int, device: torch.device | None = None) -> torch.Tensor:
    """The length of each token's document, int64 [L]."""
    lengths = torch.tensor([stop - start for start, stop in document_ranges(documents, length)], device="cpu")
    return send(lengths.repeat_interleave(lengths), torch.device("cpu") if device is None else device)


def fourier_mix_naive(x_BLD: torch.Tensor, *, norm: Literal["ortho"] | None = None) -> torch.Tensor:
    """Re(F_L x F_D) with the transform's matrices written out; O(L^2 + D^2). See `fourier_mix`."""

    def matrix(size: int) -> torch.Tensor:
        n = torch.arange(size, dtype=torch.float64, device=x_BLD.device)
        angle = -2 * math.pi * torch.outer(n, n) / max(size, 1)
        return torch.polar(torch.full_like(angle, 1 / math.sqrt(max(size, 1)) if norm == "ortho" else 1.0), angle)

    length, size = x_BLD.shape[1:]
    mixed_BLD = matrix(length) @ x_BLD.to(torch.complex128) @ matrix(size)
    return mixed_BLD.real.to(x_BLD.dtype)


@over_ranks(FourierCall)
def sharded_fourier_mix(sharding: Sharding, call: FourierCall) -> torch.Tensor:
    """`fourier_mix` on this rank's slice; of every document by itself where the layout has some.

    Shapes: x [B, L local, D] -> [B, L local, D].
    Cost: two all-to-alls; per rank and batch element (P - 1) / P of 2 L local (D // 2 + 1) elements each way. Of packed
        documents the tokens of those that lie on several ranks count; nothing where there are none.
    Reference: A Unified View of Long-Sequence Models, Sec. 6.2.
    """
    across = partial(_fourier_over_ranks, sharding.comm, norm=call.norm)
    return apart(sharding.comm, sharding.layout, call.x_BLD, partial(mix_whole, norm=call.norm), across)


def _fourier_over_ranks(
    comm: Communicator, layout: SequenceLayout, x_BLD: torch.Tensor, *, norm: FourierNorm
) -> torch.Tensor:
    """`sharded_fourier_mix` with all tokens exchanged, whichever documents they are of."""
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
