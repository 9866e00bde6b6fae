"""Operations that need the whole sequence at once and treat columns one by one: every rank takes all tokens of some.

From tokens cut across ranks to columns (heads, channels) cut across ranks, and back: one all-to-all each way. Any
number of columns over any number of ranks: the first ranks hold one more, and some may hold none.

Of packed documents those that lie whole on a rank are the local operation's. The tokens of documents that lie on
several ranks are a sequence with a layout of its own, over which the operation runs as over any other.

Shape letters: B batch, L tokens here, D channels, C columns, N numbers at each column and token.
"""

from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise

import torch

from dist_attn.comm import Communicator
from dist_attn.comm import differentiable as collectives
from dist_attn.layout import SequenceLayout
from dist_attn.ops.device import send
from dist_attn.ops.documents import document_ranges
from dist_attn.sharded.document_exchange import starts_inside


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


def apart(
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


@lru_cache(maxsize=64)
def documents_by_length(documents: tuple[int, ...], length: int) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Every length that occurs and where the documents of this length start."""
    by_length: dict[int, list[int]] = {}
    for start, stop in document_ranges(documents, length):
        by_length.setdefault(stop - start, []).append(start)
    return tuple((tokens, tuple(starts)) for tokens, starts in sorted(by_length.items()))


def by_documents(
    x_BLN: torch.Tensor, documents: tuple[int, ...], operation: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Apply an operation along dim 2 of [B, documents, tokens, N], to all documents of a length at a time.

    Shapes: x [B, L, N] -> [B, L, N'], L >= 1.
    """
    done, order = [], []
    for tokens, starts in documents_by_length(documents, x_BLN.shape[1]):
        at_NT = torch.tensor(starts, device="cpu")[:, None] + torch.arange(tokens, device="cpu")
        at_NT = send(at_NT, x_BLN.device)
        done.append(operation(x_BLN[:, at_NT.flatten()].unflatten(1, (len(starts), tokens))).flatten(1, 2))
        order.append(at_NT.flatten())
    return torch.cat(done, dim=1)[:, torch.cat(order).argsort()]
