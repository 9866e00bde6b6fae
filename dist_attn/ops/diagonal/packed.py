"""The diagonal recurrence inside each of many packed documents: one scan for all documents of a length."""

import torch

from dist_attn.ops.diagonal.chunked import diagonal_scan
from dist_attn.ops.documents import check_documents, documents_by_length

__all__ = ["packed_diagonal_scan"]


def packed_diagonal_scan(
    u_BLD: torch.Tensor,
    a_DN: torch.Tensor,
    b_DN: torch.Tensor,
    c_DN: torch.Tensor,
    *,
    documents: tuple[int, ...],
    state: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`diagonal_scan` of every document by itself, each from 0.

    `state` is that of the tokens before the first start; the state returned is the last document's.

    Shapes: as `diagonal_scan`.
    Cost: one scan per length that occurs, at most sqrt(2 L) of them.
    """
    length = u_BLD.shape[1]
    check_documents(documents, length)
    if not documents:
        return diagonal_scan(u_BLD, a_DN, b_DN, c_DN, state=state)
    first = documents[0]
    head_BLD, u_BTD = u_BLD.split((first, length - first), dim=1)
    y_head_BLD, after = diagonal_scan(head_BLD, a_DN, b_DN, c_DN, state=state)
    starts_of = documents_by_length(tuple(start - first for start in documents), length - first)
    done, order = [], []
    for tokens, starts in starts_of:
        at_NT = torch.tensor(starts, device=u_BLD.device)[:, None] + torch.arange(tokens, device=u_BLD.device)
        rows_RTD = u_BTD[:, at_NT.flatten()].unflatten(1, (len(starts), tokens)).flatten(0, 1)
        y_RTD, after_RDN = diagonal_scan(rows_RTD, a_DN, b_DN, c_DN)
        done.append(y_RTD.unflatten(0, (u_BLD.shape[0], len(starts))).flatten(1, 2))
        order.append(at_NT.flatten())
        if starts[-1] == documents[-1] - first:
            after = after_RDN.unflatten(0, (u_BLD.shape[0], len(starts)))[:, -1]
    y_BTD = torch.cat(done, dim=1)[:, torch.cat(order).argsort()]
    return torch.cat([y_head_BLD, y_BTD], dim=1), after
