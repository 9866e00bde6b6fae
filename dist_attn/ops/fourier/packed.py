"""Fourier mixing inside each of many packed documents: one transform for all documents of a length."""

from functools import lru_cache

import torch

from dist_attn.errors import ShapeError
from dist_attn.ops.documents import check_documents, document_ranges
from dist_attn.ops.fourier.fft import FourierNorm, fourier_mix

__all__ = ["documents_by_length", "packed_fourier_mix"]


def packed_fourier_mix(x_BLD: torch.Tensor, *, documents: tuple[int, ...], norm: FourierNorm = None) -> torch.Tensor:
    """`fourier_mix` of every document by itself; tokens before the first start are one too.

    Shapes: x [B, L, D] -> [B, L, D].
    Cost: one transform per length that occurs, at most sqrt(2 L) of them.
    """
    if x_BLD.dim() != 3:
        raise ShapeError(f"x has shape {tuple(x_BLD.shape)}; needed is [B, L, D]")
    batch, length, size = x_BLD.shape
    check_documents(documents, length)
    if not x_BLD.numel():
        return x_BLD.clone()
    mixed, order = [], []
    for tokens, starts in documents_by_length(documents, length):
        at_NT = torch.tensor(starts, device=x_BLD.device)[:, None] + torch.arange(tokens, device=x_BLD.device)
        rows_BNTD = x_BLD[:, at_NT.flatten()].unflatten(1, (len(starts), tokens))
        mixed.append(fourier_mix(rows_BNTD.flatten(0, 1), norm=norm).reshape(batch, -1, size))
        order.append(at_NT.flatten())
    back_L = torch.cat(order).argsort()
    return torch.cat(mixed, dim=1)[:, back_L]


@lru_cache(maxsize=64)
def documents_by_length(documents: tuple[int, ...], length: int) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Every length that occurs and where the documents of this length start."""
    by_length: dict[int, list[int]] = {}
    for start, stop in document_ranges(documents, length):
        by_length.setdefault(stop - start, []).append(start)
    return tuple((tokens, tuple(starts)) for tokens, starts in sorted(by_length.items()))
