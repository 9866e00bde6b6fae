"""The interfaces that ranks and generation know: of models that read a stream of tokens, and that score the next one.

Shape letters: B batch, L tokens on this rank, D model width, V vocabulary.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import nn

from dist_attn.errors import InputError, ShapeError
from dist_attn.mixers import MixerState
from dist_attn.mixers.softmax import SoftmaxRows, SoftmaxSlots, SoftmaxState
from dist_attn.models.encoder import check_tokens
from dist_attn.ops import SequenceOps


@dataclass(frozen=True)
class ModelState:
    """The mixers' states of all layers and how many tokens each batch element has seen."""

    layers: tuple[MixerState, ...]
    position_B: torch.Tensor

    @property
    def batch(self) -> int:
        """The number of sequences."""
        return int(self.position_B.shape[0])

    @property
    def position(self) -> int:
        """Tokens seen, where all sequences have seen equally many.

        Raises: InputError where they have not.
        """
        if not bool((self.position_B == self.position_B[0]).all()):
            raise InputError("the sequences of this state stand at different positions; use position_B")
        return int(self.position_B[0])

    def select(self, index: int | slice | list[int]) -> "ModelState":
        """The state of some of the sequences, in memory of its own; with caches by row (`beside`), of one of them."""
        at_B, tokens = self.position_B[_rows(index)].clone(), None
        if isinstance(index, int) and any(isinstance(layer, SoftmaxSlots) for layer in self.layers):
            tokens = int(at_B)
        return ModelState(tuple(_selected(s, index, tokens) for s in self.layers), at_B)

    def tensors(self) -> list[torch.Tensor]:
        """The tensors of all layers in order, and the positions."""
        return [*(tensor for layer in self.layers for tensor in layer.tensors()), self.position_B]

    def shapes(self) -> tuple[torch.Size, ...]:
        """The shapes of the tensors: states of one shape can be stacked; a key-value cache is as long as its text."""
        return tuple(tensor.shape for tensor in self.tensors())

    @staticmethod
    def stack(states: "list[ModelState]") -> "ModelState":
        """Several states side by side along the batch."""
        layers = tuple(map(_stacked, zip(*(state.layers for state in states), strict=True)))
        return ModelState(layers, torch.cat([s.position_B for s in states]))

    @staticmethod
    def beside(states: "list[ModelState]", rows: int) -> "ModelState":
        """Several states of one sequence each, side by side for decode steps of so many rows; the first fills it up.

        Keys and values are neither copied nor filled up, and may be of different lengths.
        """
        filled = states + states[:1] * (rows - len(states))
        layers: list[MixerState] = []
        for group in zip(*(state.layers for state in filled), strict=True):
            cached = [state for state in group[: len(states)] if isinstance(state, SoftmaxState)]
            layers.append(SoftmaxRows.of(cached, rows) if cached else _stacked(group))
        return ModelState(tuple(layers), torch.cat([s.position_B for s in filled]))

    def detach(self) -> "ModelState":
        """Return the values cut off from the gradient, as training passes state from segment to segment."""
        layers = tuple(s.replace(tuple(t.detach() for t in s.tensors())) for s in self.layers)
        return ModelState(layers, self.position_B)

    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.numel() * t.element_size() for s in self.layers for t in s.tensors())


def _rows(index: int | slice | list[int]) -> slice | list[int]:
    return slice(index, index + 1) if isinstance(index, int) else index


def _selected(layer: MixerState, index: int | slice | list[int], tokens: int | None) -> MixerState:
    if not isinstance(layer, SoftmaxRows | SoftmaxSlots):
        # A copy: a view would keep the states of the whole batch alive for as long as this one lives.
        return layer.replace(tuple(t[_rows(index)].clone() for t in layer.tensors()))
    if not isinstance(index, int):
        raise InputError(f"rows {index} were selected of states with a cache for each row; select one by its number")
    if isinstance(layer, SoftmaxRows):
        return layer.row(index)
    assert tokens is not None
    return layer.row(index, tokens)


def _stacked(states: tuple[MixerState, ...]) -> MixerState:
    fields = zip(*(state.tensors() for state in states), strict=True)
    return states[0].replace(tuple(map(torch.cat, fields)))


class StreamingModel(nn.Module, ABC):
    """Reads texts of any length over `SequenceOps`: whole, streamed and over ranks it gives the same numbers.

    `grain`: passes and slices begin at its multiples, counted from the text's first token; other cuts are refused.
    """

    hidden_size: int
    vocab_size: int
    grain: int = 1

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The device of the weights."""

    @property
    @abstractmethod
    def parts(self) -> list[nn.Module]:
        """The modules that a pass runs one after the other, so that others may be let in between them."""

    @property
    @abstractmethod
    def kinds(self) -> list[str]:
        """The kinds of the mixers, layer by layer, which are also the kinds of their states."""

    @property
    def layers_of_ranks(self) -> tuple[slice, ...] | None:
        """The layers of a state that each rank steps with, where weights lie over ranks; None: every rank with all.

        Then all ranks step the same sequences at the same time, and the last one alone has logits: others' are [B, 0].
        """
        return None

    @property
    def learned_positions(self) -> int | None:
        """The most tokens of a text, where there is a learned vector for each position; None: any number."""
        return None

    @property
    def feature_seed(self) -> int | None:
        """The seed of its random matrices, where it has some."""
        return None

    @abstractmethod
    def hidden(
        self, tokens_BL: torch.Tensor, ops: SequenceOps | None = None, state: ModelState | None = None
    ) -> tuple[torch.Tensor, ModelState]:
        """Hidden states after the last layer and its norm, if any, and the state after the last global token.

        Shapes: tokens [B, L] int64 (this process's slice), on the CPU or where the model is -> [B, L, D].
        Raises: ShapeError for tokens that are not [B, L] integers or a state of another batch; TokenError for ids
            outside the vocabulary, of tokens on the CPU; InputError for more tokens than there are learned positions,
            of a model on the CPU. On another device its kernels refuse both.
        """

    @abstractmethod
    def initial_state(self, batch: int) -> ModelState:
        """The state before any token."""

    def encode(self, tokens_BL: torch.Tensor) -> torch.Tensor:
        """Hidden states as `hidden` gives them, [B, L] -> [B, L, D]."""
        return self.hidden(tokens_BL)[0]

    def check(self, tokens: torch.Tensor, dims: tuple[str, ...], state: ModelState | None) -> torch.Tensor:
        """The tokens where the model is.

        Raises: as `hidden`.
        """
        known = check_tokens(tokens, dims, self.vocab_size, self.device)
        if state is not None and state.batch != tokens.shape[0]:
            raise ShapeError(
                f"tokens of {tokens.shape[0]} sequences came with a state of {state.batch}; they must be equally many"
            )
        return known


class CausalModel(StreamingModel):
    """A causal language model, which scores the next token too; stepwise it gives the same numbers as well."""

    @abstractmethod
    def readout(self, h: torch.Tensor) -> torch.Tensor:
        """Logits of the next token, [..., D] -> [..., V]; [B, D] are those of a decode step."""

    @abstractmethod
    def embed_step(self, token_B: torch.Tensor, state: ModelState) -> torch.Tensor:
        """The first part of `step`, which looks at the tokens: their vectors [B, D] after `state`.

        Raises: as `hidden`.
        """

    @abstractmethod
    def step_layers(self, x_BD: torch.Tensor, state: ModelState) -> tuple[torch.Tensor, tuple[MixerState, ...]]:
        """The other part, the same operations whatever the numbers are: logits [B, V], the layers' states."""

    def step(self, token_B: torch.Tensor, state: ModelState) -> tuple[torch.Tensor, ModelState]:
        """Feed one token to each sequence: the logits of the next one and the state after it.

        Shapes: token [B] int64 -> logits [B, V].
        Raises: as `hidden`.
        """
        logits_BV, layers = self.step_layers(self.embed_step(token_B, state), state)
        return logits_BV, ModelState(layers, state.position_B + 1)

    def logits(self, tokens_BL: torch.Tensor) -> torch.Tensor:
        """Logits of the token after each position, [B, L] -> [B, L, V]."""
        return self.readout(self.encode(tokens_BL))

    def forward(
        self, tokens_BL: torch.Tensor, ops: SequenceOps | None = None, state: ModelState | None = None
    ) -> tuple[torch.Tensor, ModelState]:
        """Logits [B, L, V] and the state after the last global token."""
        h_BLD, after = self.hidden(tokens_BL, ops, state)
        return self.readout(h_BLD), after
