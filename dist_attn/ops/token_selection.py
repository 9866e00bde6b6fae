"""Selection of tokens by their scores, in the order of the sequence; at least one token where there are any."""

import torch

from dist_attn.errors import InputError, ShapeError
from dist_attn.ops.device import send


def select_tokens(
    x_LC: torch.Tensor, score_L: torch.Tensor, *, threshold: float, at_most: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens whose score is at least `threshold`, of those the `at_most` highest, and their positions.

    Where no token reaches the threshold the one with the highest score is kept; of equal scores earlier tokens go
    first. Gradients pass to the tokens that are kept, none to scores: what a score weighs goes along as a column of x.

    Shapes: x [L, C], score [L] -> [N, C] and int64 [N], rising.
    Raises: ShapeError where they do not fit together; InputError for at_most below 1.
    Reference: A Unified View of Long-Sequence Models, Eq. 26.
    """
    check_selection(x_LC, score_L, at_most)
    position_N = _chosen(score_L, threshold=threshold, at_most=at_most)
    return x_LC.index_select(0, position_N), position_N


def check_selection(x_LC: torch.Tensor, score_L: torch.Tensor, at_most: int | None) -> None:
    """Raises: ShapeError where tokens and scores do not fit together; InputError for at_most below 1."""
    if x_LC.dim() != 2 or score_L.shape != x_LC.shape[:1]:
        raise ShapeError(
            f"x of shape {tuple(x_LC.shape)} and scores of shape {tuple(score_L.shape)} were given; needed are [L, C] "
            "and [L]"
        )
    if at_most is not None and at_most < 1:
        raise InputError(f"at_most = {at_most} was given; at least one token is kept, so give 1 or more, or None")


def comparable(score_L: torch.Tensor) -> torch.Tensor:
    """The scores without their gradient; one that is no number is below all others."""
    return score_L.detach().nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)


def first_of_highest(score_L: torch.Tensor) -> torch.Tensor:
    """The position of the highest score, the earliest of equal ones, [1]."""
    return (score_L == score_L.max()).nonzero()[:1, 0]


def highest_scores(score_N: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` highest scores, or all where there are fewer, in falling order."""
    return score_N.topk(min(count, len(score_N))).values


def share_of_highest(score_N: torch.Tensor, count: int) -> torch.Tensor:
    """Places of the `count` highest scores, rising; of equal ones the earlier go first."""
    order_N = torch.sort(score_N, descending=True, stable=True).indices
    return order_N[:count].sort().values


def _chosen(score_L: torch.Tensor, *, threshold: float, at_most: int | None) -> torch.Tensor:
    """Positions of the tokens that are kept of a whole sequence, rising."""
    score_L = comparable(score_L)
    passing_L = score_L >= threshold
    if not len(score_L):
        return passing_L.nonzero()[:, 0]
    if not bool(passing_L.any()):
        return first_of_highest(score_L)
    position_N = passing_L.nonzero()[:, 0]
    if at_most is not None and len(position_N) > at_most:
        position_N = position_N[share_of_highest(score_L[position_N], at_most)]
    return position_N


def select_tokens_naive(
    x_LC: torch.Tensor, score_L: torch.Tensor, *, threshold: float, at_most: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `select_tokens`; plain comparisons, O(L log L)."""
    scores = score_L.tolist()
    best_first = sorted(range(len(scores)), key=lambda token: (-scores[token], token))
    limit = torch.tensor(threshold, dtype=score_L.dtype, device="cpu").item()
    passing = [token for token in best_first if scores[token] >= limit] or best_first[:1]
    kept = sorted(passing if at_most is None else passing[:at_most])
    position_N = send(torch.tensor(kept, dtype=torch.int64, device="cpu"), x_LC.device)
    return x_LC[position_N], position_N
