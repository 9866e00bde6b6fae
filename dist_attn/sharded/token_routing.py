"""Routing over ranks: experts are dealt out in order, tokens travel to the rank of their expert, answers come back.

Counts of all ranks settle which assignments an expert has room for, so a token is dropped over ranks exactly where it
is on one.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch

from dist_attn.comm import Communicator
from dist_attn.comm import differentiable as collectives
from dist_attn.ops.device import take_rows
from dist_attn.ops.token_routing import RoutingCall, check_routing, slots_of_experts
from dist_attn.sharded.columns import column_cuts
from dist_attn.sharded.sharding import Sharding, over_ranks

__all__ = ["ShardedRoutes", "sharded_route_tokens"]


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
    """`ops.token_routing.route_tokens` of this rank's tokens; rank r has the experts of its range of the even cut.

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
    cuts = column_cuts(num_experts, comm.size)
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
