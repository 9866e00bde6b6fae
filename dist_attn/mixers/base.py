"""The template of every token mixer: P(X | theta), parallel over a sequence or one step at a time.

A mixer is called with whatever slice of the sequence this process holds and the `SequenceOps` that know the
rest; it never asks its rank. Its state is a value: what the tokens so far leave behind.
"""

from abc import ABC, abstractmethod
from typing import Protocol, Self, cast

import torch
from pydantic import BaseModel
from torch import nn

from dist_attn.costs import LayerCosts, layer_costs
from dist_attn.mixers.paradigm import Paradigm
from dist_attn.ops import SequenceOps

__all__ = ["MixerState", "TokenMixer", "state_zeros"]


class MixerState(Protocol):
    """A frozen value whose tensors all have the batch in dimension 0."""

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors in a fixed order."""
        ...

    def replace(self, tensors: tuple[torch.Tensor, ...]) -> Self:
        """The same kind of state over other tensors, given in the order of `tensors()`."""
        ...


class TokenMixer(nn.Module, ABC):
    """Mixes along the sequence: [B, L, D] -> [B, L, D].

    Contract (one test for all mixers): parallel = streamed = stepwise; batch elements independent; P ranks = 1 rank.
    """

    @property
    @abstractmethod
    def paradigm(self) -> Paradigm:
        """Whether the mixing is learned or fixed, and whether it depends on the input; a class has it as a value."""

    @abstractmethod
    def forward(
        self, x_BLD: torch.Tensor, ops: SequenceOps, state: MixerState | None = None
    ) -> tuple[torch.Tensor, MixerState]:
        """The mixed tokens and the state after the last global one; `state` is the one before the first."""

    @abstractmethod
    def step(self, x_BD: torch.Tensor, state: MixerState) -> tuple[torch.Tensor, MixerState]:
        """`forward` for the one token after `state`."""

    @abstractmethod
    def initial_state(self, batch: int) -> MixerState:
        """The state before any token."""

    def costs(self) -> LayerCosts:
        """Parameters, operations, state and traffic over ranks, in plain numbers.

        Raises: ConfigError for a kind without formulas.
        """
        return layer_costs(cast(BaseModel, self.config).model_dump(mode="json"))


def state_zeros(parameter: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Zeros of the type of a parameter, where it lies; whole on every rank, also where the parameter is sharded."""
    return torch.zeros(shape, dtype=parameter.dtype, device=parameter.device)
