"""Tokens to the experts that were chosen for them, up to what an expert takes, and what experts answer back to them.

Over ranks experts are dealt out in order, tokens travel to the rank of their expert, answers come back. Counts of all
ranks settle which assignments an expert has room for, so a token is dropped over ranks exactly where it is on one.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, Protocol

import torch

from dist_attn.comm import Communicator
from dist_attn.comm import differentiable as collectives
from dist_attn.errors import InputError, ShapeError
from dist_attn.layout import SequenceLayout
from dist_attn.ops import LocalSequenceOps, SequenceOps
from dist_attn.ops.device import take_rows
from dist_attn.ops.sequence_call import SequenceCall, local_form
from dist_attn.sharded.sharding import Sharding, over_ranks


class RoutedTokens(Protocol):
    """Tokens at the experts that were chosen for them; `dropped` assignments of all processes found no room."""

    @property
    def dropped(self) -> int: ...

    def by_expert(self) -> tuple[torch.Tensor, ...]:
        """The rows of every expert, [R_e, C]; none of experts that another process takes care of."""
        ...

    def restore_order(self, y_RD: torch.Tensor) -> torch.Tensor:
        """Bring what experts made of their rows, one expert after the other, to the tokens: [R, D] -> [K, N, D]."""
        ...


@dataclass(frozen=True)
class RoutingCall(SequenceCall[RoutedTokens]):
    """The arguments of `route_tokens`, which explains them."""

    x_NC: torch.Tensor
    expert_NK: torch.Tensor
    num_experts: int
    capacity: int

    operation: ClassVar[str] = "route_tokens"
    along: ClassVar[tuple[str, ...]] = ("x_NC", "expert_NK")
    dim: ClassVar[int] = 0
    packs: ClassVar[bool] = False


@dataclass(frozen=True)
class Routes:
    """The rows of all experts, one expert after the other, and how to get back.

    `source_R` says which assignment (choice N + token) a row is of. `dropped` counts the assignments for which their
    expert had no room.
    """

    x_RC: torch.Tensor
    counts: tuple[int, ...]
    dropped: int
    source_R: torch.Tensor
    tokens: int
    choices: int

    def by_expert(self) -> tuple[torch.Tensor, ...]:
        """The rows of each expert, [R_e, C] each, in the order of their slots."""
        rows: tuple[torch.Tensor, ...] = self.x_RC.split(list(self.counts))
        return rows

    def restore_order(self, y_RD: torch.Tensor) -> torch.Tensor:
        """Bring the experts' answers back to their tokens: [R, D] -> [K, N, D]; zeros where dropped."""
        size = y_RD.shape[1]
        flat_AD = y_RD.new_zeros((self.choices * self.tokens, size)).index_copy(0, self.source_R, y_RD)
        back_KND: torch.Tensor = flat_AD.unflatten(0, (self.choices, self.tokens))
        return back_KND


def route_tokens(
    x_NC: torch.Tensor, expert_NK: torch.Tensor, *, num_experts: int, capacity: int, ops: SequenceOps | None = None
) -> RoutedTokens:
    """Each token's row to the K experts chosen for it; an expert takes the first `capacity` assignments it is given.

    First choices come before all second ones, and tokens in their order (GShard, Switch). Gradients pass to x.

    Shapes: x [N, C], expert int64 [N, K] -> [R, C], R <= K N.
    Raises: ShapeError where they do not fit together; InputError for experts that there are not or no capacity.
    Reference: Fedus et al. 2022, Switch Transformers, Sec. 2.2; A Unified View of Long-Sequence Models, Fig. 4.
    """
    return (LocalSequenceOps() if ops is None else ops).run(RoutingCall(x_NC, expert_NK, num_experts, capacity))


@local_form(RoutingCall)
def route_locally(call: RoutingCall) -> Routes:
    """`route_tokens` of a call."""
    x_NC, expert_NK, num_experts, capacity = call.x_NC, call.expert_NK, call.num_experts, call.capacity
    check_routing(x_NC, expert_NK, num_experts, capacity)
    tokens, choices = expert_NK.shape
    expert_A = expert_NK.T.reshape(-1)
    slot_A = slots_of_experts(expert_A, num_experts)
    taken_R = (slot_A < capacity).nonzero()[:, 0]
    # Stable: inside an expert assignments stay in the order in which they came, which is that of slots.
    source_R = taken_R[torch.sort(expert_A[taken_R], stable=True).indices]
    counts_E = torch.bincount(expert_A[taken_R], minlength=num_experts)
    rows_RC = take_rows(x_NC, source_R % max(1, tokens))
    dropped = len(expert_A) - len(taken_R)
    return Routes(rows_RC, tuple(counts_E.tolist()), dropped, source_R, tokens, choices)


def slots_of_experts(expert_A: torch.Tensor, num_experts: int) -> torch.Tensor:
    """For each assignment, how many before it went to the same expert, [A]."""
    order_A = torch.sort(expert_A, stable=True).indices
    counts_E = torch.bincount(expert_A, minlength=num_experts)
    start_E = counts_E.cumsum(0) - counts_E
    slot_A = torch.empty_like(expert_A)
    slot_A[order_A] = torch.arange(len(expert_A), device=expert_A.device) - start_E[expert_A[order_A]]
    return slot_A


def check_routing(x_NC: torch.Tensor, expert_NK: torch.Tensor, num_experts: int, capacity: int) -> None:
    """Raises: ShapeError where tokens and choices do not fit; InputError for experts that there are not."""
    fits = x_NC.dim() == expert_NK.dim() == 2 and len(x_NC) == len(expert_NK) and expert_NK.dtype == torch.int64
    if not fits:
        raise ShapeError(
            f"x of shape {tuple(x_NC.shape)} and choices of shape {tuple(expert_NK.shape)} and {expert_NK.dtype} were "
            "given; needed are [N, C] and int64 [N, K]"
        )
    if num_experts < 1 or capacity < 1:
        raise InputError(f"{num_experts} experts of capacity {capacity} were given; needed is 1 or more of either")
    if expert_NK.numel() and (int(expert_NK.min()) < 0 or int(expert_NK.max()) >= num_experts):
        raise InputError(
            f"experts {int(expert_NK.min())} to {int(expert_NK.max())} were chosen; there are 0 to {num_experts - 1}"
        )


def route_tokens_naive(
    x_NC: torch.Tensor, expert_NK: torch.Tensor, *, num_experts: int, capacity: int
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The rows of every expert, and the slot of each assignment there (-1: dropped). See `route_tokens`."""
    rows: list[list[int]] = [[] for _ in range(num_experts)]
    slot_NK = torch.full_like(expert_NK, -1)
    for choice in range(expert_NK.shape[1]):
        for token, expert in enumerate(expert_NK[:, choice].tolist()):
            if len(rows[expert]) < capacity:
                slot_NK[token, choice] = len(rows[expert])
                rows[expert].append(token)
    return [x_NC[torch.tensor(tokens, dtype=torch.int64, device="cpu")] for tokens in rows], slot_NK


@dataclass(frozen=True)
class ShardedRoutes:
    """The rows of this rank's experts, one expert after the other, and how to get back.

    `order_R` says which received row stands where, `source_S` which assignment (choice N + token) a sent row is of.
    """

    x_RC: torch.Tensor
    counts: tuple[int, ...]
    dropped: int
    comm: Communicator
    order_R: torch.Tensor
    source_S: torch.Tensor
    sent: tuple[int, ...]
    received: tuple[int, ...]
    tokens: int
    choices: int

    def by_expert(self) -> tuple[torch.Tensor, ...]:
        """The rows of each expert, [R_e, C], in the order of their slots; none of experts on other ranks."""
        rows: tuple[torch.Tensor, ...] = self.x_RC.split(list(self.counts))
        return rows

    def restore_order(self, y_RD: torch.Tensor) -> torch.Tensor:
        """Bring the experts' answers back to their tokens: [R, D] -> [K, N, D]; zeros where dropped.

        Cost: one all-to-all of the rows that change ranks.
        """
        arrived_RD = torch.zeros_like(y_RD).index_copy(0, self.order_R, y_RD)
        back_SD = collectives.all_to_all(self.comm, arrived_RD, self.received, self.sent, label="from experts")
        flat_AD = back_SD.new_zeros((self.choices * self.tokens, y_RD.shape[1])).index_copy(0, self.source_S, back_SD)
        back_KND: torch.Tensor = flat_AD.unflatten(0, (self.choices, self.tokens))
        return back_KND


@over_ranks(RoutingCall)
def sharded_route_tokens(sharding: Sharding, call: RoutingCall) -> ShardedRoutes:
    """`route_tokens` of this rank's tokens; rank r has the experts of its range of the even cut.

    With fewer experts than ranks the last ranks have none.

    Shapes: x [N local, C], expert [N local, K] -> the rows of this rank's experts, [R, C].
    Cost: an all-gather of K E counts; an all-to-all of the rows that change ranks, K N C (P - 1) / P in all for even
        choices.
    Raises: as the local form.
    """
    comm, x_NC, expert_NK = sharding.comm, call.x_NC, call.expert_NK
    num_experts, capacity = call.num_experts, call.capacity
    check_routing(x_NC, expert_NK, num_experts, capacity)
    tokens, choices = expert_NK.shape
    expert_A = expert_NK.T.reshape(-1)
    choice_A = torch.arange(choices, device=expert_A.device).repeat_interleave(tokens)
    group_A = choice_A * num_experts + expert_A
    counts_KE = torch.bincount(group_A, minlength=choices * num_experts).unflatten(0, (choices, num_experts))
    counts_PKE = comm.all_gather(counts_KE, label="choices of experts")
    # First come: first choices of all ranks, then second ones; inside a choice the ranks in order.
    queue_XE = counts_PKE.transpose(0, 1).flatten(0, 1)
    before_XE = queue_XE.cumsum(0) - queue_XE
    room_PKE = (capacity - before_XE).clamp(min=0).minimum(queue_XE).unflatten(0, (choices, comm.size)).transpose(0, 1)

    slot_A = slots_of_experts(group_A, choices * num_experts)
    taken_S = (slot_A < room_PKE[comm.rank].reshape(-1)[group_A]).nonzero()[:, 0]
    # By expert, so by rank; inside an expert by choice and token, since assignments stand in that order.
    source_S = taken_S[torch.sort(expert_A[taken_S], stable=True).indices]
    cuts = SequenceLayout.even(num_experts, comm.size).cuts
    to_P = [int(room_PKE[comm.rank, :, start:stop].sum()) for start, stop in pairwise(cuts)]
    own_PKE = room_PKE[:, :, cuts[comm.rank] : cuts[comm.rank + 1]]
    from_P = own_PKE.sum(dim=(1, 2)).tolist()
    sent_SC = take_rows(x_NC, source_S % max(1, tokens))
    arrived_RC = collectives.all_to_all(comm, sent_SC, to_P, from_P, label="to experts")
    order_R = _by_slot(own_PKE)
    counts_E = torch.zeros(num_experts, dtype=torch.int64, device="cpu")
    counts_E[cuts[comm.rank] : cuts[comm.rank + 1]] = own_PKE.sum(dim=(0, 1)).cpu()
    return ShardedRoutes(
        take_rows(arrived_RC, order_R),
        tuple(counts_E.tolist()),
        int(counts_PKE.sum() - room_PKE.sum()),
        comm,
        order_R,
        source_S,
        tuple(to_P),
        tuple(from_P),
        tokens,
        choices,
    )


def _by_slot(counts_PKE: torch.Tensor) -> torch.Tensor:
    """The places of the rows of each expert, choice and sender among those received, in order of slots, [R].

    Rows come by sender, expert, choice; slots go by expert, choice, sender.
    """
    ranks, choices, experts = counts_PKE.shape
    arriving = counts_PKE.transpose(1, 2).reshape(-1)
    numbers = torch.arange(ranks * experts * choices, device=counts_PKE.device).reshape(ranks, experts, choices)
    wanted_EKP = numbers.permute(1, 2, 0).reshape(-1)
    place = torch.empty_like(wanted_EKP)
    place[wanted_EKP] = torch.arange(len(wanted_EKP), device=counts_PKE.device)
    return torch.sort(place.repeat_interleave(arriving), stable=True).indices
