"""Fourier mixing inside each of many packed documents: one transform for all documents of a length."""

from collections.abc import Callable
from functools import lru_cache

import torch

from dist_attn.errors import ShapeError
from dist_attn.ops.documents import check_documents, document_ranges
from dist_attn.ops.fourier.fft import FourierNorm, fourier_mix

__all__ = ["by_documents", "document_lengths", "documents_by_length", "packed_fourier_mix"]


def packed_fourier_mix(x_BLD: torch.Tensor, *, documents: tuple[int, ...], norm: FourierNorm = None) -> torch.Tensor:
    """`fourier_mix` of every document by itself; tokens before the first start are one too.

    Shapes: x [B, L, D] -> [B, L, D].
    Cost: one transform per length that occurs, at most sqrt(2 L) of them.
    """
    if x_BLD.dim() != 3:
        raise ShapeError(f"x has shape {tuple(x_BLD.shape)}; needed is [B, L, D]")
    check_documents(documents, x_BLD.shape[1])
    if not x_BLD.numel():
        return x_BLD.clone()

    def mix(rows_BNTD: torch.Tensor) -> torch.Tensor:
        return fourier_mix(rows_BNTD.flatten(0, 1), norm=norm).reshape(rows_BNTD.shape)

    return by_documents(x_BLD, documents, mix)


def by_documents(
    x_BLN: torch.Tensor, documents: tuple[int, ...], operation: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """What an operation along dim 2 makes of [B, documents, tokens, N], for all documents of a length at a time.

    Shapes: x [B, L, N] -> [B, L, N'], L >= 1.
    """
    done, order = [], []
    for tokens, starts in documents_by_length(documents, x_BLN.shape[1]):
        at_NT = torch.tensor(starts, device=x_BLN.device)[:, None] + torch.arange(tokens, device=x_BLN.device)
        done.append(operation(x_BLN[:, at_NT.flatten()].unflatten(1, (len(starts), tokens))).flatten(1, 2))
        order.append(at_NT.flatten())
    return torch.cat(done, dim=1)[:, torch.cat(order).argsort()]


def document_lengths(documents: tuple[int, ...], length: int, device: torch.device | None = None) -> torch.Tensor:
    """The length of each token's document, int64 [L]."""
    lengths = torch.tensor([stop - start for start, stop in document_ranges(documents, length)], device=device)
    return lengths.repeat_interleave(lengths)


@lru_cache(maxsize=64)
def documents_by_length(documents: tuple[int, ...], length: int) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Every length that occurs and where the documents of this length start."""
    by_length: dict[int, list[int]] = {}
    for start, stop in document_ranges(documents, length):
        by_length.setdefault(stop - start, []).append(start)
    return tuple((tokens, tuple(starts)) for tokens, starts in sorted(by_length.items()))
