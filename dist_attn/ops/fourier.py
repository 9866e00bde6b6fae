"""Fourier token mixing (FNet) by the fast transform, any length; packed documents of a length share one transform."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from dist_attn.errors import ShapeError
from dist_attn.ops.device import send
from dist_attn.ops.documents import by_documents, check_documents, document_ranges
from dist_attn.ops.sequence_call import SequenceCall, local_form

FourierNorm = Literal["ortho"] | None


def fourier_mix(
    x_BLD: torch.Tensor, *, norm: FourierNorm = None, documents: tuple[int, ...] | None = None
) -> torch.Tensor:
    """The real part of the Fourier transform over sequence and features, unnormalised or unitary ("ortho").

    With packed `documents`, given by their starts, that of every document by itself; tokens before the first are one.

    Shapes: x [B, L, D] -> [B, L, D]; half-precision inputs are transformed in float32.
    Cost: one transform per length of document that occurs, at most sqrt(2 L) of them.
    Raises: ShapeError for another number of dimensions.
    Reference: A Unified View of Long-Sequence Models, Sec. 6.2 (FNet); the code of FNet is unnormalised.
    """
    if x_BLD.dim() != 3:
        raise ShapeError(f"x has shape {tuple(x_BLD.shape)}; needed is [B, L, D]")
    check_documents(documents or (), x_BLD.shape[1])
    if not x_BLD.numel():
        return x_BLD.clone()
    if documents:

        def mix(rows_BNTD: torch.Tensor) -> torch.Tensor:
            return fourier_mix(rows_BNTD.flatten(0, 1), norm=norm).reshape(rows_BNTD.shape)

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
    return fourier_mix(call.x_BLD, norm=call.norm, documents=call.documents)


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
