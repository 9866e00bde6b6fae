"""What a LegS memory goes on from: its coefficients and how many tokens they describe."""

from dataclasses import dataclass

import torch

__all__ = ["LegsState"]


@dataclass(frozen=True)
class LegsState:
    """Coefficients c [B, D, N] of every channel's past, in float64, and the tokens seen [B] so far, int64.

    A token changes the coefficients by about 1/t of their size: in float32 a memory would lose the digits of its
    updates after a million tokens, and stop at ten million.
    """

    c_BDN: torch.Tensor
    seen_B: torch.Tensor

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors in a fixed order."""
        return (self.c_BDN, self.seen_B)

    def replace(self, tensors: tuple[torch.Tensor, ...]) -> "LegsState":
        """The same kind of state over other tensors."""
        return LegsState(*tensors)

    @staticmethod
    def empty(batch: int, channels: int, size: int, *, device: torch.device | None = None) -> "LegsState":
        """The state before any token."""
        c_BDN = torch.zeros((batch, channels, size), dtype=torch.float64, device=device)
        return LegsState(c_BDN, torch.zeros(batch, dtype=torch.int64, device=device))
