"""Tokens to the experts that were chosen for them, up to what an expert takes, and what experts answer back to them."""

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch

from dist_attn.errors import InputError, ShapeError
from dist_attn.ops.device import take_rows
from dist_attn.ops.sequence_call import SequenceCall, local_form


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


@local_form(RoutingCall)
def route_call(call: RoutingCall) -> RoutedTokens:
    """`route_tokens` of a call."""
    return route_tokens(call.x_NC, call.expert_NK, num_experts=call.num_experts, capacity=call.capacity)


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


def route_tokens(x_NC: torch.Tensor, expert_NK: torch.Tensor, *, num_experts: int, capacity: int) -> Routes:
    """Each token's row to the K experts chosen for it; an expert takes the first `capacity` assignments it is given.

    First choices come before all second ones, and tokens in their order (GShard, Switch). Gradients pass to x.

    Shapes: x [N, C], expert int64 [N, K] -> [R, C], R <= K N.
    Raises: ShapeError where they do not fit together; InputError for experts that there are not or no capacity.
    Reference: Fedus et al. 2022, Switch Transformers, Sec. 2.2; A Unified View of Long-Sequence Models, Fig. 4.
    """
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
