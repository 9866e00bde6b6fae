"""Long convolution inside each of many packed documents: one transform for all documents of a length."""

import torch

from dist_attn.ops.documents import by_documents, check_documents
from dist_attn.ops.long_convolution.fft import check_kernels, long_convolve

__all__ = ["packed_long_convolve"]


def packed_long_convolve(
    x_BLD: torch.Tensor,
    kernel_LD: torch.Tensor,
    *,
    documents: tuple[int, ...],
    backward_kernel_LD: torch.Tensor | None = None,
) -> torch.Tensor:
    """`long_convolve` of every document by itself; tokens before the first start are one too.

    Shapes: x [B, L, D], kernels [K, D] and [K', D] -> [B, L, D].
    Cost: transforms of x and of the kernels per length that occurs, at most sqrt(2 L) of them.
    """
    check_kernels(x_BLD, kernel_LD, backward_kernel_LD)
    check_documents(documents, x_BLD.shape[1])
    if not documents or not x_BLD.numel():
        return long_convolve(x_BLD, kernel_LD, backward_kernel_LD=backward_kernel_LD)

    def convolve(rows_BNTD: torch.Tensor) -> torch.Tensor:
        y_RTD = long_convolve(rows_BNTD.flatten(0, 1), kernel_LD, backward_kernel_LD=backward_kernel_LD)
        return y_RTD.reshape(rows_BNTD.shape)

    return by_documents(x_BLD, documents, convolve)
