"""Selection of tokens by their scores, in the order of the sequence, and what lies between those that were kept.

At least one token is kept where there are any. Up-sampling is linear in the position, or from the nearest by distance.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

import torch

from dist_attn.errors import InputError, ShapeError
from dist_attn.ops.device import send, take_rows
from dist_attn.ops.sequence_call import SequenceCall

if TYPE_CHECKING:
    from dist_attn.ops.sequence_ops import SequenceOps


def select_tokens(
    x_LC: torch.Tensor, score_L: torch.Tensor, *, threshold: float, at_most: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens whose score is at least `threshold`, of those the `at_most` highest, and their positions.

    Where no token reaches the threshold the one with the highest score is kept; of equal scores earlier tokens go
    first. Gradients pass to the tokens that are kept, not to scores: to weigh by scores, make these a column of x.

    Shapes: x [L, C], score [L] -> [N, C] and int64 [N], rising.
    Raises: ShapeError where they do not fit together; InputError for at_most below 1.
    Reference: A Unified View of Long-Sequence Models, Eq. 26.
    """
    check_selection(x_LC, score_L, at_most)
    position_N = _chosen(score_L, threshold=threshold, at_most=at_most)
    return take_rows(x_LC, position_N), position_N


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


@dataclass(frozen=True)
class Interpolation:
    """A way to fill a position between kept tokens: on the line between the two beside it, or from the k nearest.

    Raises: InputError for fewer than one neighbour.
    """

    kind: Literal["linear", "knn"] = "linear"
    neighbours: int = 3

    def __post_init__(self) -> None:
        if self.neighbours < 1:
            raise InputError(f"{self.neighbours} neighbours were given; needed is 1 or more")

    @property
    def reach(self) -> int:
        """The number of kept tokens on each side of a position that may have a part in it."""
        return 1 if self.kind == "linear" else self.neighbours


def upsample(
    z_ND: torch.Tensor, position_N: torch.Tensor, wanted_T: torch.Tensor, how: Interpolation | None = None
) -> torch.Tensor:
    """Values at the positions `wanted_T`, interpolated between those at `position_N`, which rise.

    Where a token was kept its value is copied. Before the first and behind the last one `linear` copies that one. `knn`
    weighs the nearest tokens by 1 / distance^2, of equal distances the smaller position first, and takes all tokens
    where there are fewer. Gradients pass to z.

    Shapes: z [N, D], position int64 [N], wanted int64 [T] -> [T, D].
    Cost: O(T k) index arithmetic and k T D multiplications; k = 2 for linear.
    Raises: ShapeError where they do not fit together; InputError without any token to take values from.
    Reference: A Unified View of Long-Sequence Models, Sec. 10, Fig. 4 (kNN or linear).
    """
    how = Interpolation() if how is None else how
    if z_ND.dim() != 2 or position_N.shape != z_ND.shape[:1] or wanted_T.dim() != 1:
        raise ShapeError(
            f"z of shape {tuple(z_ND.shape)}, positions {tuple(position_N.shape)} and wanted {tuple(wanted_T.shape)} "
            "were given; needed are [N, D], [N] and [T]"
        )
    if not len(wanted_T):
        return z_ND[:0]
    if not len(position_N):
        raise InputError("there is no token to take values from; keep at least one")
    index_TK, weight_TK = (_line if how.kind == "linear" else _nearest)(position_N, wanted_T, how.reach)
    weight_TK = weight_TK.to(z_ND.dtype)
    out_TD = weight_TK[:, :1] * take_rows(z_ND, index_TK[:, 0])
    for k in range(1, index_TK.shape[1]):
        out_TD = out_TD + weight_TK[:, k : k + 1] * take_rows(z_ND, index_TK[:, k])
    return out_TD


def _line(position_N: torch.Tensor, wanted_T: torch.Tensor, reach: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens at both sides of each position and what share each has, [T, 2]."""
    at_T = torch.searchsorted(position_N, wanted_T)
    right_T = at_T.clamp(max=len(position_N) - 1)
    exact_T = position_N[right_T] == wanted_T
    left_T = torch.where(exact_T | (at_T == len(position_N)), right_T, (at_T - 1).clamp(min=0))
    gap_T = position_N[right_T] - position_N[left_T]
    share_T = (wanted_T - position_N[left_T]).clamp(min=0).double() / gap_T.clamp(min=1)
    share_T = torch.where(gap_T > 0, share_T, torch.zeros_like(share_T))
    return torch.stack([left_T, right_T], dim=1), torch.stack([1 - share_T, share_T], dim=1)


def _nearest(position_N: torch.Tensor, wanted_T: torch.Tensor, reach: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The nearest tokens of each position and what share each has, [T, K]."""
    # Positions rise: the K nearest are among K on either side.
    around_J = torch.arange(-reach, reach, device=position_N.device)
    candidate_TJ = torch.searchsorted(position_N, wanted_T)[:, None] + around_J
    inside_TJ = (candidate_TJ >= 0) & (candidate_TJ < len(position_N))
    candidate_TJ = candidate_TJ.clamp(0, len(position_N) - 1)
    far = torch.iinfo(torch.int64).max
    distance_TJ = (position_N[candidate_TJ] - wanted_T[:, None]).abs().masked_fill(~inside_TJ, far)
    # Stable, and candidates rise: of two at one distance the smaller position comes first.
    distance_TK, order_TK = (t[:, :reach] for t in torch.sort(distance_TJ, dim=1, stable=True))
    weight_TK = torch.where(distance_TK < far, 1.0 / distance_TK.clamp(min=1).double().square(), 0.0)
    exact_T1 = distance_TK[:, :1] == 0
    first_K = torch.arange(weight_TK.shape[1], device=position_N.device) == 0
    weight_TK = torch.where(exact_T1, first_K.to(weight_TK.dtype), weight_TK)
    return candidate_TJ.gather(1, order_TK), weight_TK / weight_TK.sum(dim=1, keepdim=True)


def upsample_naive(
    z_ND: torch.Tensor, position_N: torch.Tensor, wanted_T: torch.Tensor, *, neighbours: int | None = None
) -> torch.Tensor:
    """See `upsample`; O(T N)."""
    kept = position_N.tolist()
    rows = []
    for t in wanted_T.tolist():
        if t in kept:
            rows.append(z_ND[kept.index(t)])
        elif neighbours is None:
            left = max((n for n, p in enumerate(kept) if p < t), default=None)
            right = min((n for n, p in enumerate(kept) if p > t), default=None)
            if left is None or right is None:
                rows.append(z_ND[-1 if right is None else 0])
            else:
                share = (t - kept[left]) / (kept[right] - kept[left])
                rows.append((1 - share) * z_ND[left] + share * z_ND[right])
        else:
            nearest = sorted(range(len(kept)), key=lambda n: (abs(kept[n] - t), kept[n]))[:neighbours]
            weights = [1.0 / (kept[n] - t) ** 2 for n in nearest]
            rows.append(sum(w * z_ND[n] for w, n in zip(weights, nearest, strict=True)) / sum(weights))
    return torch.stack(rows) if rows else z_ND.new_zeros((0, z_ND.shape[1]))


class SelectedTokens(Protocol):
    """The tokens that were kept, spread evenly, with their positions and the operations along them.

    `total` counts them on all processes.
    """

    @property
    def x_NC(self) -> torch.Tensor: ...

    @property
    def position_N(self) -> torch.Tensor: ...

    @property
    def total(self) -> int: ...

    @property
    def ops(self) -> "SequenceOps": ...

    def upsample(self, z_ND: torch.Tensor, how: Interpolation) -> torch.Tensor:
        """Values at all positions of the sequence that was selected from, [N, D] of the kept ones -> [L, D]."""
        ...


@dataclass(frozen=True)
class SelectionCall(SequenceCall[SelectedTokens]):
    """The arguments of `select_tokens`, which explains them."""

    x_LC: torch.Tensor
    score_L: torch.Tensor
    threshold: float
    at_most: int | None = None

    operation: ClassVar[str] = "select_tokens"
    along: ClassVar[tuple[str, ...]] = ("x_LC", "score_L")
    dim: ClassVar[int] = 0
    packs: ClassVar[bool] = False
