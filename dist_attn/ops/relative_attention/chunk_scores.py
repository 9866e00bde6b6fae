"""Scores of relative positions as the matrices of whole chunks, a column for each key, made without an index per score.

Row i of a chunk's matrix is row i - 1 moved on by one key. So each row is written once, as wide as all the moves need,
and read with a row stride that is one element short: a view, whose gradient is a view too.
"""

import torch

__all__ = ["CHUNK_TOKENS", "scores_before", "scores_on_both_sides"]

CHUNK_TOKENS = 64


def scores_before(positions_BHNCR: torch.Tensor, *, own: bool) -> torch.Tensor:
    """Of every query for all older keys as one, the k - 1 before its chunk, and the chunk's own; 0 behind the query.

    Shapes: positions of the rows -k .. 0, R = k + 1 -> [B, H, N, C, 1 + max(k - 1, 0) + C]. `own`: whether a query sees
        its own key.
    """
    *_, chunk, rows = positions_BHNCR.shape
    seen = positions_BHNCR[..., min(rows - 1, 1) : rows - 1 + own]
    unseen = positions_BHNCR.new_zeros((1,) * 5)
    return _moved_on(positions_BHNCR[..., :1], seen, unseen, chunk + 1 - own)


def scores_on_both_sides(positions_BHNCR: torch.Tensor) -> torch.Tensor:
    """Of every query for all older keys as one, k - 1 keys, the chunk's own, k - 1 more, and all later ones as one.

    Shapes: positions of the rows -k .. k, k >= 1, R = 2 k + 1 -> [B, H, N, C, C + 2 k].
    """
    *_, chunk, _ = positions_BHNCR.shape
    return _moved_on(positions_BHNCR[..., :1], positions_BHNCR[..., 1:-1], positions_BHNCR[..., -1:], chunk + 1)


def _moved_on(before: torch.Tensor, near: torch.Tensor, after: torch.Tensor, behind: int) -> torch.Tensor:
    """[B, H, N, C, J]: row i is `before` i + 1 times, then `near`, then `after`, which is written `behind` times."""
    *lead, chunk, _ = near.shape
    parts = [before.expand(*lead, chunk, chunk), near, after.expand(*lead, chunk, behind)]
    rows_BHNCX = torch.cat(parts, dim=-1)
    width = rows_BHNCX.shape[-1]
    moved_BHNCX: torch.Tensor = rows_BHNCX.flatten(3)[..., chunk - 1 : chunk * width - 1].unflatten(
        3, (chunk, width - 1)
    )
    return moved_BHNCX[..., : width - chunk]
