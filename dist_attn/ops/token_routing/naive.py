"""The oracle of routing: assignments are handed out one after the other, first choices first."""

import torch

__all__ = ["route_tokens_naive"]


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
    return [x_NC[torch.tensor(tokens, dtype=torch.int64)] for tokens in rows], slot_NK
