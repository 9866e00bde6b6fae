"""Operations that look at whole documents, on packed documents: those on one rank stay there, only the others travel.

The tokens of documents that lie on several ranks are a sequence with a layout of its own, over which the operation
runs as over any other; documents that lie whole on a rank are the local operation's.
"""

from collections.abc import Callable
from functools import partial

import torch

from dist_attn.comm import Communicator
from dist_attn.layout import SequenceLayout
from dist_attn.ops.fourier import FourierNorm, packed_fourier_mix
from dist_attn.ops.long_convolution import packed_long_convolve
from dist_attn.ops.softmax_attention import RelativePositions, packed_softmax_attention
from dist_attn.sharded.fourier import sharded_fourier_mix
from dist_attn.sharded.long_convolution import sharded_long_convolve

__all__ = ["sharded_packed_fourier_mix", "sharded_packed_long_convolve", "sharded_packed_softmax_attention"]


def sharded_packed_softmax_attention(
    comm: Communicator,
    layout: SequenceLayout,
    q_BHLK: torch.Tensor,
    k_BGLK: torch.Tensor,
    v_BGLV: torch.Tensor,
    *,
    attention: Callable[..., torch.Tensor],
    causal: bool,
    scale: float | None = None,
    relative: RelativePositions | None = None,
) -> torch.Tensor:
    """`ops.softmax_attention` with documents on this rank's slice; queries and keys lie on the same layout.

    Cost: that of `attention`, a sharded one, for the tokens of documents that lie on several ranks; nothing where there
        are none.
    """
    if not layout.crosses_cuts:
        documents = layout.documents_on(comm.rank)
        return packed_softmax_attention(
            q_BHLK, k_BGLK, v_BGLV, causal=causal, scale=scale, documents=documents, relative=relative
        )
    parts = layout.pieces(comm.rank)
    (q0, q1, q2), (k0, k1, k2), (v0, v1, v2) = (t.split(parts, dim=2) for t in (q_BHLK, k_BGLK, v_BGLV))
    across_BHLV = attention(
        comm,
        layout.across_cuts,
        *(torch.cat(pair, dim=2) for pair in ((q0, q2), (k0, k2), (v0, v2))),
        causal=causal,
        scale=scale,
        relative=relative,
    )
    inside_BHLV = packed_softmax_attention(
        q1, k1, v1, causal=causal, scale=scale, documents=_inside(layout, comm.rank), relative=relative
    )
    first, last = across_BHLV.split((parts[0], parts[2]), dim=2)
    return torch.cat([first, inside_BHLV, last], dim=2)


def sharded_packed_fourier_mix(
    comm: Communicator, layout: SequenceLayout, x_BLD: torch.Tensor, *, norm: FourierNorm = None
) -> torch.Tensor:
    """`ops.fourier_mix` of every document by itself on this rank's slice.

    Cost: that of `sharded_fourier_mix` for the tokens of documents that lie on several ranks; nothing where there are
        none.
    """
    return _apart(
        comm,
        layout,
        x_BLD,
        inside=partial(packed_fourier_mix, norm=norm),
        across=partial(sharded_fourier_mix, norm=norm),
    )


def sharded_packed_long_convolve(
    comm: Communicator,
    layout: SequenceLayout,
    x_BLD: torch.Tensor,
    kernel_LD: torch.Tensor,
    *,
    backward_kernel_LD: torch.Tensor | None = None,
) -> torch.Tensor:
    """`ops.long_convolve` of every document by itself on this rank's slice.

    Cost: that of `sharded_long_convolve` for the tokens of documents that lie on several ranks; nothing where there
        are none.
    """
    return _apart(
        comm,
        layout,
        x_BLD,
        inside=partial(packed_long_convolve, kernel_LD=kernel_LD, backward_kernel_LD=backward_kernel_LD),
        across=partial(sharded_long_convolve, kernel_LD=kernel_LD, backward_kernel_LD=backward_kernel_LD),
    )


def _apart(
    comm: Communicator,
    layout: SequenceLayout,
    x_BLD: torch.Tensor,
    *,
    inside: Callable[..., torch.Tensor],
    across: Callable[..., torch.Tensor],
) -> torch.Tensor:
    """`inside` for the tokens of documents that lie whole on this rank, `across` ranks for the others."""
    if not layout.crosses_cuts:
        return inside(x_BLD, documents=layout.documents_on(comm.rank))
    parts = layout.pieces(comm.rank)
    x0, x1, x2 = x_BLD.split(parts, dim=1)
    across_BLD = across(comm, layout.across_cuts, torch.cat([x0, x2], dim=1))
    inside_BLD = inside(x1, documents=_inside(layout, comm.rank))
    first, last = across_BLD.split((parts[0], parts[2]), dim=1)
    return torch.cat([first, inside_BLD, last], dim=1)


def _inside(layout: SequenceLayout, rank: int) -> tuple[int, ...]:
    """Where documents start among the tokens of documents that lie whole on the rank."""
    first, inside, _ = layout.pieces(rank)
    return tuple(start - first for start in layout.documents_on(rank) if 0 <= start - first < inside)
