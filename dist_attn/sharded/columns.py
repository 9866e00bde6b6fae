"""Operations that need the whole sequence at once and treat columns one by one: every rank takes all tokens of some.

From tokens cut across ranks to columns (heads, channels) cut across ranks, and back: one all-to-all each way. Any
number of columns over any number of ranks: the first ranks hold one more, and some may hold none.

Fourier mixing transforms features locally first. The transform of a real row is Hermitian, so only D // 2 + 1 of its D
columns travel; after the transform over the sequence, column D - d is the mirror image (in the sequence) of column d.

Of packed documents those that lie whole on a rank are the local operation's. The tokens of documents that lie on
several ranks are a sequence with a layout of its own, over which the operation runs as over any other.

Shape letters: B batch, L tokens here, D channels, C columns, N numbers at each column and token, K taps of a kernel.
"""

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch

from dist_attn.comm import Communicator
from dist_attn.comm import differentiable as collectives
from dist_attn.layout import SequenceLayout
from dist_attn.ops.documents import by_documents
from dist_attn.ops.fourier import FourierCall, FourierNorm, document_lengths, fourier_mix
from dist_attn.ops.long_convolution import LongConvolutionCall, check_kernels, long_convolve
from dist_attn.sharded.sharding import Sharding, over_ranks


def column_cuts(columns: int, size: int) -> tuple[int, ...]:
    """Rank r holds columns [cuts[r], cuts[r + 1]), as even as whole columns allow."""
    return SequenceLayout.even(columns, size).cuts


def tokens_to_columns(comm: Communicator, layout: SequenceLayout, x_CLN: torch.Tensor, *, label: str) -> torch.Tensor:
    """All tokens of this rank's columns.

    Shapes: x [C, L local, N], C columns -> [own C, L global, N].
    Cost: sends L C N (P - 1) / P elements per rank for even cuts, in P - 1 messages.
    """
    columns, length, numbers = x_CLN.shape
    sizes = [stop - start for start, stop in pairwise(column_cuts(columns, comm.size))]
    own = sizes[comm.rank]
    rows = collectives.all_to_all(
        comm,
        x_CLN.reshape(columns * length, numbers),
        [count * length for count in sizes],
        [own * other for other in layout.lengths],
        label=label,
    )
    parts = rows.split([own * other for other in layout.lengths])
    return torch.cat(
        [part.reshape(own, other, numbers) for part, other in zip(parts, layout.lengths, strict=True)], dim=1
    )


def columns_to_tokens(
    comm: Communicator, layout: SequenceLayout, y_CLN: torch.Tensor, columns: int, *, label: str
) -> torch.Tensor:
    """This rank's tokens of all columns: the way back of `tokens_to_columns`.

    Shapes: y [own C, L global, N] -> [C, L local, N].
    """
    own, _, numbers = y_CLN.shape
    length = layout.lengths[comm.rank]
    sizes = [stop - start for start, stop in pairwise(column_cuts(columns, comm.size))]
    rows = collectives.all_to_all(
        comm,
        torch.cat([part.reshape(own * part.shape[1], numbers) for part in y_CLN.split(list(layout.lengths), dim=1)]),
        [own * other for other in layout.lengths],
        [count * length for count in sizes],
        label=label,
    )
    return rows.reshape(columns, length, numbers)


@over_ranks(FourierCall)
def sharded_fourier_mix(sharding: Sharding, call: FourierCall) -> torch.Tensor:
    """`ops.fourier_mix` on this rank's slice; of every document by itself where the layout has some.

    Shapes: x [B, L local, D] -> [B, L local, D].
    Cost: two all-to-alls; per rank and batch element (P - 1) / P of 2 L local (D // 2 + 1) elements each way. Of packed
        documents the tokens of those that lie on several ranks count; nothing where there are none.
    Reference: A Unified View of Long-Sequence Models, Sec. 6.2.
    """
    across = partial(_fourier_over_ranks, sharding.comm, norm=call.norm)
    return _apart(sharding.comm, sharding.layout, call.x_BLD, partial(fourier_mix, norm=call.norm), across)


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


@over_ranks(LongConvolutionCall)
def sharded_long_convolve(sharding: Sharding, call: LongConvolutionCall) -> torch.Tensor:
    """`ops.long_convolve` on this rank's slice; of every document by itself where the layout has some.

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
        y_BTC = long_convolve(
            columns_CTB.permute(2, 1, 0),
            kernel_LD[:, own],
            backward_kernel_LD=own_backward,
            documents=layout.documents or (),
        )
        y_CTB = y_BTC.permute(2, 1, 0)
        return columns_to_tokens(comm, layout, y_CTB, channels, label="long convolution back").permute(2, 1, 0)

    inside = partial(long_convolve, kernel_LD=kernel_LD, backward_kernel_LD=backward_kernel_LD)
    return _apart(comm, layout, x_BLD, inside, across)


def _apart(
    comm: Communicator,
    layout: SequenceLayout,
    x_BLD: torch.Tensor,
    inside: Callable[..., torch.Tensor],
    across: Callable[[SequenceLayout, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """`inside` for the tokens of documents that lie whole on this rank, `across` ranks for the others."""
    if not layout.documents:
        return across(layout, x_BLD)
    if not layout.crosses_cuts:
        return inside(x_BLD, documents=layout.documents_on(comm.rank))
    parts = layout.pieces(comm.rank)
    x0, x1, x2 = x_BLD.split(parts, dim=1)
    across_BLD = across(layout.across_cuts, torch.cat([x0, x2], dim=1))
    inside_BLD = inside(x1, documents=starts_inside(layout, comm.rank))
    first, last = across_BLD.split((parts[0], parts[2]), dim=1)
    return torch.cat([first, inside_BLD, last], dim=1)


def starts_inside(layout: SequenceLayout, rank: int) -> tuple[int, ...]:
    """The starts of documents among the tokens of documents that lie whole on the rank."""
    first, inside, _ = layout.pieces(rank)
    return tuple(start - first for start in layout.documents_on(rank) if 0 <= start - first < inside)
