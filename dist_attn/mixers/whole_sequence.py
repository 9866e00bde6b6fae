"""Mixers that take a sequence whole: every token sees later ones too, so there is no state and no step."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import NoReturn

import torch

from dist_attn.errors import InputError
from dist_attn.mixers.base import FieldsState, MixerState, TokenMixer
from dist_attn.ops import SequenceOps


@dataclass(frozen=True)
class NoState(FieldsState):
    """The empty state of a mixer that has seen the whole sequence: no later token could go on from it."""


class WholeSequenceMixer(TokenMixer):
    """A mixer without a state; a subclass gives `mix`, and says its `name` for errors."""

    name: str

    @abstractmethod
    def mix(self, x_BLD: torch.Tensor, ops: SequenceOps) -> torch.Tensor:
        """The mixed tokens, [B, L, D] -> [B, L, D]."""

    def forward(
        self, x_BLD: torch.Tensor, ops: SequenceOps, state: MixerState | None = None
    ) -> tuple[torch.Tensor, NoState]:
        if state is not None and not isinstance(state, NoState):
            raise InputError(f"a {type(state).__name__} was given to {self.name}, which takes no state")
        return self.mix(x_BLD, ops), NoState()

    def step(self, x_BD: torch.Tensor, state: MixerState) -> NoReturn:
        raise InputError(f"{self.name} sees the sequence whole and has no step; take a causal mixer to decode")

    def initial_state(self, batch: int) -> NoState:
        return NoState()
