"""What state-space mixers share: the state of every feature's system, and the read-out behind it."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from dist_attn.errors import InputError
from dist_attn.mixers.base import MixerState, TokenMixer

__all__ = ["Readout", "StateSpaceState", "own_state"]


@dataclass(frozen=True)
class StateSpaceState:
    """What every feature's system remembers, [B, D, …] in real numbers."""

    x: torch.Tensor

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors in a fixed order."""
        return (self.x,)

    def replace(self, tensors: tuple[torch.Tensor, ...]) -> "StateSpaceState":
        """The same kind of state over other tensors."""
        return StateSpaceState(*tensors)


class Readout(nn.Module):
    """glu(out(gelu(y + d x)))."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.skip_D = nn.Parameter(torch.randn(size))
        self.out = nn.Linear(size, 2 * size)

    def forward(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return F.glu(self.out(F.gelu(y + self.skip_D * x)), dim=-1)


def own_state(mixer: TokenMixer, state: MixerState | None, batch: int) -> torch.Tensor:
    """The numbers of a state that belongs to this mixer, or of its initial one.

    Raises: InputError for the state of another mixer.
    """
    first = mixer.initial_state(batch)
    if state is None:
        (x,) = first.tensors()
        return x
    if not isinstance(state, StateSpaceState) or state.x.shape[1:] != first.tensors()[0].shape[1:]:
        raise InputError(f"a {type(state).__name__} was given to a state space; it needs its own state")
    return state.x
