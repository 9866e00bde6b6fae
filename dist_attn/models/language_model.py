"""The causal language model: encode, score, and decode from a state."""

import math
from dataclasses import dataclass
from typing import Self, cast

import torch
import torch.nn.functional as F
from torch import nn

from dist_attn.errors import InputError, ShapeError
from dist_attn.mixers import MixerState, redraw_pools
from dist_attn.mixers.narrow_layers import NarrowLayer, refuse_training
from dist_attn.mixers.softmax import SoftmaxState
from dist_attn.model_config.language_model import LanguageModelConfig, mixers_of_layers
from dist_attn.models.blocks import Block, build_norm, watched
from dist_attn.models.encoder import check_tokens, position_layers, with_positions
from dist_attn.ops import LocalSequenceOps, SequenceOps


@dataclass(frozen=True)
class ModelState:
    """The mixers' states of all layers and how many tokens each batch element has seen."""

    layers: tuple[MixerState, ...]
    position_B: torch.Tensor

    @property
    def batch(self) -> int:
        """How many sequences this is the state of."""
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
        """The state of some of the sequences, in memory of its own."""
        rows = slice(index, index + 1) if isinstance(index, int) else index
        # A copy: a view would keep the states of the whole batch alive for as long as this one lives.
        layers = tuple(s.replace(tuple(t[rows].clone() for t in s.tensors())) for s in self.layers)
        return ModelState(layers, self.position_B[rows].clone())

    @staticmethod
    def stack(states: "list[ModelState]") -> "ModelState":
        """Several states side by side along the batch."""
        layers = tuple(
            group[0].replace(tuple(torch.cat(fields) for fields in zip(*(s.tensors() for s in group), strict=True)))
            for group in zip(*(state.layers for state in states), strict=True)
        )
        return ModelState(layers, torch.cat([s.position_B for s in states]))

    def detach(self) -> "ModelState":
        """The same values cut off from the gradient: how training passes state from segment to segment."""
        layers = tuple(s.replace(tuple(t.detach() for t in s.tensors())) for s in self.layers)
        return ModelState(layers, self.position_B)

    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.numel() * t.element_size() for s in self.layers for t in s.tensors())


class LanguageModel(nn.Module):
    """Embedding, pre-norm blocks, final norm, and a read-out that shares the embedding's weights or has its own."""

    def __init__(self, config: LanguageModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(
            Block(mixer, config.mlp_size, config.block) for mixer in mixers_of_layers(config.mixer, config.num_layers)
        )
        self.norm = build_norm(config.block.norm, config.hidden_size)
        self.position_embedding, self.position_map = position_layers(config.positions, config.hidden_size)
        self.unembedding: nn.Linear | None = None
        if config.readout == "own":
            self.unembedding = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self._initialise()

    def hidden(
        self, tokens_BL: torch.Tensor, ops: SequenceOps | None = None, state: ModelState | None = None
    ) -> tuple[torch.Tensor, ModelState]:
        """Hidden states after the final norm and the state after the last global token.

        Shapes: tokens [B, L] int64 (this process's slice), on the CPU or where the model is -> [B, L, D].
        Raises: ShapeError for tokens that are not [B, L] integers or a state of another batch; TokenError for ids
            outside the vocabulary, of tokens on the CPU; InputError for more tokens than there are learned positions,
            of a model on the CPU. On another device its kernels refuse both.
        """
        ops = LocalSequenceOps() if ops is None else ops
        tokens_BL = self._check(tokens_BL, ("batch", "length"), state)
        state = self.initial_state(tokens_BL.shape[0]) if state is None else state
        position_B = state.position_B + ops.total_length(tokens_BL.shape[1])
        positions_L = ops.positions(tokens_BL.shape[1], tokens_BL.device)
        x_BLD = self._embed(tokens_BL, state.position_B[:, None] + positions_L, position_B)
        layers = []
        for block, before in zip(watched(self.blocks), state.layers, strict=True):
            x_BLD, after = block(x_BLD, ops, before)
            layers.append(_contiguous(after))
        return self.norm(x_BLD), ModelState(tuple(layers), position_B)

    def readout(self, h: torch.Tensor) -> torch.Tensor:
        """Logits of the next token, [..., D] -> [..., vocabulary]; [B, D] are those of a decode step."""
        table: nn.Embedding | nn.Linear | NarrowLayer = self.embedding if self.unembedding is None else self.unembedding
        return table.project(h) if isinstance(table, NarrowLayer) else F.linear(h, table.weight)

    def train(self, mode: bool = True) -> Self:
        """Raises: InputError for `mode` where weights are held in fewer bits; the model is then what it was."""
        if mode:
            refuse_training(self)
        return super().train(mode)

    def encode(self, tokens_BL: torch.Tensor) -> torch.Tensor:
        """Hidden states after the final norm, [B, L] -> [B, L, D]."""
        return self.hidden(tokens_BL)[0]

    def logits(self, tokens_BL: torch.Tensor) -> torch.Tensor:
        """Logits of the token after each position, [B, L] -> [B, L, vocabulary]."""
        return self.readout(self.encode(tokens_BL))

    def forward(
        self, tokens_BL: torch.Tensor, ops: SequenceOps | None = None, state: ModelState | None = None
    ) -> tuple[torch.Tensor, ModelState]:
        """Logits [B, L, vocabulary] and the state after the last global token."""
        h_BLD, after = self.hidden(tokens_BL, ops, state)
        return self.readout(h_BLD), after

    def redraw(self, step: int) -> bool:
        """New random matrices from the mixers' pools for a training step; whether any layer has a pool.

        A state from before is then one of other features: begin with the initial one.
        """
        return redraw_pools(self, step)

    def initial_state(self, batch: int) -> ModelState:
        """The state before any token."""
        layers = tuple(block.mixer.initial_state(batch) for block in self._blocks())
        return ModelState(layers, torch.zeros(batch, dtype=torch.int64, device=self.embedding.weight.device))

    def step(self, token_B: torch.Tensor, state: ModelState) -> tuple[torch.Tensor, ModelState]:
        """Feed one token to each sequence: the logits of the next one and the state after it.

        Shapes: token [B] int64 -> logits [B, vocabulary].
        Raises: as `hidden`.
        """
        logits_BV, layers = self.step_layers(self.embed_step(token_B, state), state.layers)
        return logits_BV, ModelState(layers, state.position_B + 1)

    def embed_step(self, token_B: torch.Tensor, state: ModelState) -> torch.Tensor:
        """The first part of `step`, which looks at the tokens: their vectors [B, D] after `state`.

        Raises: as `hidden`.
        """
        token_B = self._check(token_B, ("batch",), state)
        return self._embed(token_B, state.position_B, state.position_B + 1)

    def step_layers(
        self, x_BD: torch.Tensor, layers: tuple[MixerState, ...]
    ) -> tuple[torch.Tensor, tuple[MixerState, ...]]:
        """The other part, the same operations whatever the numbers are: logits [B, vocabulary], the layers' states."""
        states = []
        for block, before in zip(watched(self.blocks), layers, strict=True):
            x_BD, after = block.step(x_BD, before)
            states.append(_contiguous(after))
        return self.readout(self.norm(x_BD)), tuple(states)

    def _embed(self, tokens: torch.Tensor, positions: torch.Tensor, end_B: torch.Tensor) -> torch.Tensor:
        """Tokens and their positions as vectors; `end_B` is where all ranks' tokens end."""
        x: torch.Tensor = self.embedding(tokens)
        layers = (self.position_embedding, self.position_map)
        return with_positions(x, positions, end_B, self.config.positions, layers)

    def _blocks(self) -> list[Block]:
        return cast(list[Block], list(self.blocks))

    def _check(self, tokens: torch.Tensor, dims: tuple[str, ...], state: ModelState | None) -> torch.Tensor:
        known = check_tokens(tokens, dims, self.config.vocab_size, self.embedding.weight.device)
        if state is not None and state.batch != tokens.shape[0]:
            raise ShapeError(
                f"tokens of {tokens.shape[0]} sequences came with a state of {state.batch}; they must be equally many"
            )
        return known

    def _initialise(self) -> None:
        deep = 0.02 / math.sqrt(2 * self.config.num_layers)
        for name, parameter in self.named_parameters():
            if name.endswith(("qkv.weight", "mlp_in.weight", "embedding.weight", "position_map.weight")):
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith(("out.weight", "mlp_out.weight")):
                nn.init.normal_(parameter, std=deep)
            elif name.endswith(("qkv.bias", "out.bias", "mlp_in.bias", "position_map.bias")):
                nn.init.zeros_(parameter)


def _contiguous(state: MixerState) -> MixerState:
    """The same values, each tensor in order in memory.

    How a product is summed up may depend on how its factors lie, and a restored state must go on with the same bits.
    Keys and values with room behind them lie as their number says, wherever they come from.
    """
    if isinstance(state, SoftmaxState) and state.cache.room is not None:
        return state
    return state.replace(tuple(t.contiguous() for t in state.tensors()))
