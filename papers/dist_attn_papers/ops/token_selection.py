"""Selection of tokens by their scores, in the order of the sequence, and what lies between those that were kept.

At least one token is kept where there are any. Up-sampling is linear in the position, or from the nearest by distance.

Over ranks, which are kept is found from a few scores; then ranks get equally many kept tokens. Counts of all ranks say
where each rank's kept tokens stand among all; one exchange spreads them evenly, in order. For up-sampling each rank
gets the kept tokens around its own positions, and interpolates by itself.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import torch

from dist_attn.comm import Communicator
from dist_attn.errors import InputError, ShapeError
from dist_attn.layout import SequenceLayout
from dist_attn.ops import LocalSequenceOps, local_form
from dist_attn.ops.device import send, take_rows
from dist_attn.ops.sequence_call import SequenceCall
from dist_attn.ops.sequence_ops import SequenceOps
from dist_attn.sharded.block_table import BlockTable, TableBlock
from dist_attn.sharded.redistribution import realign_tokens, redistribute
from dist_attn.sharded.redistribution_plan import Change, plan_redistribution
from dist_attn.sharded.sequence_ops import ShardedSequenceOps
from dist_attn.sharded.sharding import Sharding, over_ranks


def select_tokens(
    x_LC: torch.Tensor,
    score_L: torch.Tensor,
    *,
    threshold: float,
    at_most: int | None = None,
    ops: SequenceOps | None = None,
) -> "SelectedTokens":
    """The tokens whose score is at least `threshold`, of those the `at_most` highest, and their positions.

    Where no token reaches the threshold the one with the highest score is kept; of equal scores earlier tokens go
    first. Gradients pass to the tokens that are kept, not to scores: to weigh by scores, make these a column of x.

    Shapes: x [L, C], score [L] -> [N, C] and int64 [N], rising.
    Raises: ShapeError where they do not fit together; InputError for at_most below 1, and for packed documents.
    Reference: A Unified View of Long-Sequence Models, Eq. 26.
    """
    return (LocalSequenceOps() if ops is None else ops).run(SelectionCall(x_LC, score_L, threshold, at_most))


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
    def ops(self) -> SequenceOps: ...

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


@local_form(SelectionCall)
def select_locally(call: SelectionCall) -> SelectedTokens:
    """`select_tokens` of a call."""
    check_selection(call.x_LC, call.score_L, call.at_most)
    position_N = _chosen(call.score_L, threshold=call.threshold, at_most=call.at_most)
    ops = LocalSequenceOps(implementation=call.implementation)
    return _LocallySelected(take_rows(call.x_LC, position_N), position_N, len(call.x_LC), ops)


@dataclass(frozen=True)
class _LocallySelected:
    """The tokens kept of a sequence that lies whole in this process."""

    x_NC: torch.Tensor
    position_N: torch.Tensor
    length: int
    ops: SequenceOps

    @property
    def total(self) -> int:
        return len(self.position_N)

    def upsample(self, z_ND: torch.Tensor, how: Interpolation) -> torch.Tensor:
        """See `upsample`."""
        return upsample(z_ND, self.position_N, torch.arange(self.length, device=z_ND.device), how)


@dataclass(frozen=True)
class ShardedSelection:
    """This rank's share of the kept tokens, held as `layout` says; by their positions they lie as `found` says."""

    x_NC: torch.Tensor
    position_N: torch.Tensor
    ops: SequenceOps
    comm: Communicator
    source: SequenceLayout
    found: SequenceLayout
    layout: SequenceLayout

    @property
    def total(self) -> int:
        """Kept tokens on all ranks."""
        return self.layout.total

    def upsample(self, z_ND: torch.Tensor, how: Interpolation) -> torch.Tensor:
        """`upsample` at this rank's positions of `source`.

        A rank takes the kept tokens of its own positions and `how.reach` on either side, so that neighbours hold
        copies, whose gradients add up.

        Shapes: z [N local, D] -> [L local, D].
        Cost: an all-to-all of the kept tokens that change ranks, at most N / P + found.lengths[r] + 2 reach rows each,
            and one of their positions.
        """
        comm = self.comm
        target = BlockTable((self.found.total,), comm.size, tuple(_needed(self.source, self.found, how.reach)))
        held = BlockTable.grid([self.layout.cuts], range(comm.size), comm.size)

        def around(rows_NC: torch.Tensor, label: str) -> torch.Tensor:
            # Every rank keeps its own part of the target: its positions lie there.
            plan = plan_redistribution((Change(held, target, rows_NC.shape[1]),), relabel=False)
            return redistribute(comm, plan, rows_NC, label=label)[0]

        near_ND = around(z_ND, "up-sampling")
        near_N = around(self.position_N[:, None], "positions of up-sampling")[:, 0]
        start, stop = self.source.range(comm.rank)
        return upsample(near_ND, near_N, torch.arange(start, stop, device=z_ND.device), how)


@over_ranks(SelectionCall)
def sharded_select_tokens(sharding: Sharding, call: SelectionCall) -> ShardedSelection:
    """`select_tokens` of this rank's slice.

    Shapes: x [L local, C], score [L local] -> this rank's even share of the kept [N, C], [N].
    Cost: an all-gather of 2 numbers; with more candidates than `at_most`, one of that many scores from each rank; an
        all-to-all of the kept rows that change ranks, and one of their positions. 2 small agreements of layouts.
    Raises: as the local form.
    """
    comm, layout, x_LC, score_L, at_most = sharding.comm, sharding.layout, call.x_LC, call.score_L, call.at_most
    check_selection(x_LC, score_L, at_most)
    own_N, counts = _chosen_here(comm, layout, comparable(score_L), call.threshold, at_most)
    position_N = own_N + layout.range(comm.rank)[0]
    found = SequenceLayout.from_lengths(counts)
    even = SequenceLayout.even(found.total, comm.size)

    def spread(rows_NC: torch.Tensor, label: str) -> torch.Tensor:
        return realign_tokens(comm, found, even, rows_NC[None, None], label=label)[0, 0]

    rows_NC = spread(take_rows(x_LC, own_N), "kept tokens")
    positions_N = spread(position_N[:, None], "kept positions")[:, 0]
    ops = ShardedSequenceOps(
        comm,
        even,
        softmax=sharding.softmax,
        exchange=sharding.exchange,
        cache=sharding.cache,
        implementation=sharding.implementation,
    )
    return ShardedSelection(rows_NC, positions_N, ops, comm, layout, found, even)


def _chosen_here(
    comm: Communicator, layout: SequenceLayout, score_L: torch.Tensor, threshold: float, at_most: int | None
) -> tuple[torch.Tensor, list[int]]:
    """Places of the tokens kept here, rising, and how many each rank keeps; every rank decides by the same numbers."""
    own_N = (score_L >= threshold).nonzero()[:, 0]
    best = score_L.max().double() if len(score_L) else score_L.new_tensor(-torch.inf, dtype=torch.float64)
    told_2 = torch.stack([torch.full_like(best, len(own_N)), best])
    told_P2 = comm.all_gather(told_2, label="candidates").cpu()
    counts = [int(count) for count in told_P2[:, 0].tolist()]
    if not sum(counts):
        # All are below the threshold: the best token stays, on the first rank that has it.
        ranks = [rank for rank, length in enumerate(layout.lengths) if length]
        winner = max(ranks, key=told_P2[:, 1].tolist().__getitem__, default=-1)
        own_N = first_of_highest(score_L) if winner == comm.rank else own_N
        return own_N, [int(rank == winner) for rank in range(comm.size)]
    if at_most is None or sum(counts) <= at_most:
        return own_N, counts
    kept = _share_of_ranks(comm, score_L[own_N], counts, at_most)
    return own_N[share_of_highest(score_L[own_N], kept[comm.rank])], kept


def _share_of_ranks(comm: Communicator, score_N: torch.Tensor, counts: list[int], at_most: int) -> list[int]:
    """Count each rank's candidates among the `at_most` highest of all; of equal ones earlier ranks' come first."""
    width = min(max(counts), at_most)
    padded_W = score_N.new_full((width,), -torch.inf)
    highest_N = highest_scores(score_N, width)
    padded_W[: len(highest_N)] = highest_N
    scores_PW = comm.all_gather(padded_W, label="highest scores")
    limit = scores_PW.flatten().topk(at_most).values[-1]
    # A score may be -inf as well, or no number and counted so: what only fills a row up is equal to none.
    counts_P1 = send(torch.tensor(counts, device="cpu"), scores_PW.device)[:, None]
    given_PW = torch.arange(width, device=scores_PW.device) < counts_P1
    above_P = (scores_PW > limit).sum(dim=1).tolist()
    equal_P = ((scores_PW == limit) & given_PW).sum(dim=1).tolist()
    left, kept = at_most - sum(above_P), []
    for above, equal in zip(above_P, equal_P, strict=True):
        kept.append(above + min(equal, left))
        left -= kept[-1] - above
    return kept


def _needed(source: SequenceLayout, found: SequenceLayout, reach: int) -> list[TableBlock]:
    """For each rank the kept tokens that have a part in its positions; none for a rank without positions."""
    blocks = []
    for rank in range(source.size):
        start, stop = found.range(rank)
        around = (max(0, start - reach), min(found.total, stop + reach)) if source.lengths[rank] else (0, 0)
        blocks.append(TableBlock(rank, (around,)))
    return blocks
