"""Long convolution in O(L log L): a product of spectra, padded so that nothing wraps around.

Packed documents of a length share one transform.

Reference: A Unified View of Long-Sequence Models, Sec. 6.1 and 7 (SGConv, S4 in convolution form).
"""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F

from dist_attn.errors import ShapeError
from dist_attn.layout import SequenceLayout
from dist_attn.ops import LocalSequenceOps, SequenceOps
from dist_attn.ops.device import without_autocast
from dist_attn.ops.documents import check_documents
from dist_attn.ops.sequence_call import SequenceCall, local_form
from dist_attn.sharded import Sharding, over_ranks
from dist_attn_papers.ops.columns import apart, by_documents, column_cuts, columns_to_tokens, tokens_to_columns


def long_convolve(
    x_BLD: torch.Tensor,
    kernel_LD: torch.Tensor,
    *,
    backward_kernel_LD: torch.Tensor | None = None,
    ops: SequenceOps | None = None,
) -> torch.Tensor:
    """Depthwise y_t = sum_{j >= 0} k_j x_{t-j}, zero outside; with a second kernel also + sum_{m >= 0} k'_m x_{t+1+m}.

    Kernels may be shorter than the sequence, or longer: taps that reach nothing are ignored. Rounding is relative to
    the largest values of the sequence, and it is not causal: outputs may move in their last bits with later inputs.
    Of packed documents that of every document by itself.

    Shapes: x [B, L, D], kernels [K, D] and [K', D] -> [B, L, D] in x's dtype; half precision is computed in float32.
    Cost: transforms of x and of the kernels per length of document that occurs, at most sqrt(2 L) of them.
    Raises: ShapeError when they do not fit together.
    """
    return (LocalSequenceOps() if ops is None else ops).run(LongConvolutionCall(x_BLD, kernel_LD, backward_kernel_LD))


def convolve_whole(
    x_BLD: torch.Tensor,
    kernel_LD: torch.Tensor,
    *,
    backward_kernel_LD: torch.Tensor | None = None,
    documents: tuple[int, ...] | None = None,
) -> torch.Tensor:
    """`long_convolve` of a sequence that lies whole in this process; tokens before the first document are one."""
    check_kernels(x_BLD, kernel_LD, backward_kernel_LD)
    length = x_BLD.shape[1]
    check_documents(documents or (), length)
    if documents and x_BLD.numel():

        def convolve(rows_BNTD: torch.Tensor) -> torch.Tensor:
            y_RTD = convolve_whole(rows_BNTD.flatten(0, 1), kernel_LD, backward_kernel_LD=backward_kernel_LD)
            return y_RTD.reshape(rows_BNTD.shape)

        return by_documents(x_BLD, documents, convolve)
    kernel_LD = kernel_LD[:length]
    behind, ahead = kernel_LD.shape[0], 0
    if backward_kernel_LD is not None:
        backward_kernel_LD = backward_kernel_LD[: max(length - 1, 0)]
        ahead = backward_kernel_LD.shape[0]
    if not x_BLD.numel():
        # The same graph as with tokens: a rank without channels must join the exchanges of a backward pass.
        nothing = kernel_LD[:0].sum() + (0 if backward_kernel_LD is None else backward_kernel_LD[:0].sum())
        return x_BLD + nothing.to(x_BLD.dtype)
    wide = torch.promote_types(x_BLD.dtype, torch.float32)
    # Offsets t - s lie in (-L, L): the taps behind need `behind` - 1 zeros after them, those ahead one more than taps.
    size = _fast_size(length + max(behind - 1, ahead))
    with without_autocast(x_BLD.device):
        taps_DK = F.pad(kernel_LD.to(wide).T, (0, size - behind))
        if backward_kernel_LD is not None:
            # On the circle of `size` points, offset -1 - m lies at size - 1 - m.
            taps_DK = taps_DK + F.pad(backward_kernel_LD.to(wide).T.flip(1), (size - ahead, 0))
        spectrum_BDF = torch.fft.rfft(x_BLD.to(wide).transpose(1, 2), n=size) * torch.fft.rfft(taps_DK)
        y_BDL: torch.Tensor = torch.fft.irfft(spectrum_BDF, n=size)[..., :length]
    return y_BDL.transpose(1, 2).to(x_BLD.dtype)


@dataclass(frozen=True)
class LongConvolutionCall(SequenceCall[torch.Tensor]):
    """The arguments of `long_convolve`, which explains them."""

    x_BLD: torch.Tensor
    kernel_LD: torch.Tensor
    backward_kernel_LD: torch.Tensor | None = None

    operation: ClassVar[str] = "long_convolve"
    along: ClassVar[tuple[str, ...]] = ("x_BLD",)


@local_form(LongConvolutionCall)
def convolve_long(call: LongConvolutionCall) -> torch.Tensor:
    """`long_convolve` of a call."""
    backward_LD = call.backward_kernel_LD
    return convolve_whole(call.x_BLD, call.kernel_LD, backward_kernel_LD=backward_LD, documents=call.documents)


def check_kernels(x: torch.Tensor, kernel: torch.Tensor, backward_kernel: torch.Tensor | None) -> None:
    """Raise ShapeError in words when x and the kernels do not fit together."""
    kernels = [kernel] if backward_kernel is None else [kernel, backward_kernel]
    if x.dim() != 3 or any(k.dim() != 2 or k.shape[1] != x.shape[2] for k in kernels):
        raise ShapeError(
            f"x has shape {tuple(x.shape)} and the kernels {[tuple(k.shape) for k in kernels]}; needed are x [B, L, D] "
            "and kernels [taps, D]"
        )


def _fast_size(least: int) -> int:
    """The smallest 2^a 3^b 5^c, a >= 1, that is at least `least`: transforms of such sizes are the fast ones."""
    best = 1 << max(1, (least - 1).bit_length())
    odd = 1
    while odd < best:
        part = odd
        while part < best:
            twos = max(1, (-(-least // part) - 1).bit_length())
            best = min(best, part << twos)
            part *= 3
        odd *= 5
    return best


def long_convolve_naive(
    x_BLD: torch.Tensor, kernel_LD: torch.Tensor, *, backward_kernel_LD: torch.Tensor | None = None
) -> torch.Tensor:
    """y_t = sum_j k_j x_{t-j} + sum_m k'_m x_{t+1+m} tap by tap, O(L^2); see `long_convolve`."""
    length = x_BLD.shape[1]
    y_BLD = torch.zeros_like(x_BLD)
    for j in range(min(length, kernel_LD.shape[0])):
        y_BLD[:, j:] = y_BLD[:, j:] + kernel_LD[j] * x_BLD[:, : length - j]
    if backward_kernel_LD is not None:
        for ahead in range(1, min(length, backward_kernel_LD.shape[0] + 1)):
            y_BLD[:, : length - ahead] = y_BLD[:, : length - ahead] + backward_kernel_LD[ahead - 1] * x_BLD[:, ahead:]
    return y_BLD


@over_ranks(LongConvolutionCall)
def sharded_long_convolve(sharding: Sharding, call: LongConvolutionCall) -> torch.Tensor:
    """`long_convolve` on this rank's slice; of every document by itself where the layout has some.

    Kernels are whole on every rank, their gradients this rank's share.

    Shapes: x [B, L local, D], kernels [K, D] -> [B, L local, D].
    Cost: two all-to-alls; a rank with D' of the D channels sends B L local (D - D') elements and then
        B (L - L local) D'. Of packed documents the tokens of those that lie on several ranks count; nothing where there
        are none.
    """
    comm, layout = sharding.comm, sharding.layout
    x_BLD, kernel_LD, backward_kernel_LD = call.x_BLD, call.kernel_LD, call.backward_kernel_LD
    check_kernels(x_BLD, kernel_LD, backward_kernel_LD)
    channels = x_BLD.shape[2]
    own = slice(*column_cuts(channels, comm.size)[comm.rank : comm.rank + 2])
    own_backward = None if backward_kernel_LD is None else backward_kernel_LD[:, own]

    def across(layout: SequenceLayout, x_BLD: torch.Tensor) -> torch.Tensor:
        columns_CTB = tokens_to_columns(comm, layout, x_BLD.permute(2, 1, 0), label="long convolution")
        y_BTC = convolve_whole(
            columns_CTB.permute(2, 1, 0),
            kernel_LD[:, own],
            backward_kernel_LD=own_backward,
            documents=layout.documents or (),
        )
        y_CTB = y_BTC.permute(2, 1, 0)
        return columns_to_tokens(comm, layout, y_CTB, channels, label="long convolution back").permute(2, 1, 0)

    inside = partial(convolve_whole, kernel_LD=kernel_LD, backward_kernel_LD=backward_kernel_LD)
    return apart(comm, layout, x_BLD, inside, across)
