"""What state-space mixers share: the state of every feature's system, and the read-out behind it."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from dist_attn.mixers.base import MixerState, require_own


@dataclass(frozen=True)
class StateSpaceState:
    """What every feature's system remembers, [B, D, …] in real numbers; `kind` is the mixer's."""

    x: torch.Tensor
    kind: str

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors in a fixed order."""
        return (self.x,)

    def replace(self, tensors: tuple[torch.Tensor, ...]) -> "StateSpaceState":
        """The same kind of state over other tensors."""
        (x,) = tensors
        return StateSpaceState(x, self.kind)


class Readout(nn.Module):
    """glu(out(gelu(y + d x)))."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.skip_D = nn.Parameter(torch.randn(size))
        self.out = nn.Linear(size, 2 * size)

    def forward(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return F.glu(self.out(F.gelu(y + self.skip_D * x)), dim=-1)


def own_state(state: MixerState | None, first: StateSpaceState) -> StateSpaceState:
    """A state that belongs to the mixer whose state before any token is `first`, or `first` itself.

    Raises: InputError for the state of another mixer.
    """
    if state is None:
        return first
    return require_own(state, StateSpaceState, first.kind, [tuple(first.x.shape)])
