"""The template of every token mixer: P(X | theta), parallel over a sequence or one step at a time.

A mixer is called with whatever slice of the sequence this process holds and the `SequenceOps` that know the
rest; it never asks its rank. Its state is a value: what the tokens so far leave behind.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import NoReturn, Protocol, Self, TypeVar, cast, runtime_checkable

import torch
from torch import nn

from dist_attn.costs import LayerCosts
from dist_attn.errors import ConfigError, InputError
from dist_attn.model_config.mixer import MixerConfig, mixer_builder
from dist_attn.ops import SequenceOps


class Paradigm(Enum):
    """P(X | theta) or P(X), with X in the mixing or not; the value is the paper's number.

    The paper counts state spaces as dependent on the input, because their state is; with constant matrices the weights
    between tokens are not.

    Reference: A Unified View of Long-Sequence Models, Sec. 2.
    """

    LEARNED_INDEPENDENT = 1
    LEARNED_DEPENDENT = 2
    FIXED_INDEPENDENT = 3
    FIXED_DEPENDENT = 4

    @property
    def learned(self) -> bool:
        """Return whether the mixing has parameters."""
        return self in (Paradigm.LEARNED_INDEPENDENT, Paradigm.LEARNED_DEPENDENT)

    @property
    def dependent(self) -> bool:
        """Return whether the mixing depends on the input."""
        return self in (Paradigm.LEARNED_DEPENDENT, Paradigm.FIXED_DEPENDENT)

    def __str__(self) -> str:
        return f"{'learned' if self.learned else 'fixed'}, {'dependent' if self.dependent else 'independent'}"


class MixerState(Protocol):
    """A frozen value whose tensors all have the batch in dimension 0."""

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors in a fixed order."""
        ...

    def replace(self, tensors: tuple[torch.Tensor, ...]) -> Self:
        """Return a state of the same kind over other tensors, given in the order of `tensors()`."""
        ...


class FieldsState:
    """A `MixerState` for dataclasses whose tensors are fields: those that are there, in the order of the fields."""

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors in a fixed order."""
        return tuple(value for value in vars(self).values() if isinstance(value, torch.Tensor))

    def replace(self, tensors: tuple[torch.Tensor, ...]) -> Self:
        """Return a state of the same kind over other tensors."""
        names = [name for name, value in vars(self).items() if isinstance(value, torch.Tensor)]
        return replace(self, **dict(zip(names, tensors, strict=True)))  # type: ignore[type-var]  # a dataclass


@runtime_checkable
class GrowingState(MixerState, Protocol):
    """A state with tensors that get longer with the text, such as a key-value cache."""

    def standing_at(self, position: int) -> Self:
        """This state as the one after `position` tokens; asked before it is stored and after it was restored.

        Raises: InputError where its tensors are not those of so many tokens, or other ranks hold a part of them.
        """
        ...


class TokenMixer(nn.Module, ABC):
    """Mixes along the sequence: [B, L, D] -> [B, L, D].

    Contract (one test for all mixers): parallel = streamed = stepwise; batch elements independent; P ranks = 1 rank.
    """

    @property
    @abstractmethod
    def paradigm(self) -> Paradigm:
        """The kind of mixing: learned or fixed, dependent on the input or not; a class has it as a value."""

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
        """Parameters, operations, state and traffic over ranks, in plain numbers."""
        return LayerCosts(cast(MixerConfig, self.config))


def state_zeros(parameter: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Zeros of the type of a parameter, where it lies; whole on every rank, also where the parameter is sharded."""
    return torch.zeros(shape, dtype=parameter.dtype, device=parameter.device)


State = TypeVar("State", bound=MixerState)


def require_own(state: MixerState, own: type[State], kind: str, shapes: Sequence[tuple[int | None, ...]]) -> State:
    """The state as what it is. `shapes` are those of its tensors, in order; None stands for any number.

    States that several kinds of mixers share say in `kind` which one left them: sizes may be equal by chance.

    Raises: InputError for a state of another kind or with other sizes, with what was given and what is needed.
    """
    own_shapes = [tuple(tensor.shape) for tensor in state.tensors()]
    left_by = getattr(state, "kind", kind)
    if not isinstance(state, own) or left_by != kind or not _fit(own_shapes, shapes):
        name = type(state).__name__ if not hasattr(state, "kind") else f"{type(state).__name__} of {left_by}"
        raise InputError(
            f"a {name} with tensors {_words(own_shapes)} was given to {kind}; it needs its own state, a {own.__name__} "
            f"with tensors {_words(shapes)}"
        )
    return state


def _fit(own_shapes: Sequence[tuple[int, ...]], shapes: Sequence[tuple[int | None, ...]]) -> bool:
    return len(own_shapes) == len(shapes) and all(
        len(has) == len(needs) and all(need is None or size == need for size, need in zip(has, needs, strict=True))
        for has, needs in zip(own_shapes, shapes, strict=True)
    )


def _words(shapes: Sequence[tuple[int | None, ...]]) -> str:
    return ", ".join("[" + ", ".join("any" if size is None else str(size) for size in shape) + "]" for shape in shapes)


def build_mixer(config: MixerConfig) -> TokenMixer:
    """The mixer that `config.kind` names, with fresh parameters.

    Raises: ConfigError for a configuration whose kind is not registered.
    """
    mixer = mixer_builder(config)(config)
    if not isinstance(mixer, TokenMixer):
        raise ConfigError(
            f"what is registered for the mixer {config.kind!r} made a {type(mixer).__name__}, no TokenMixer"
        )
    return mixer


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
