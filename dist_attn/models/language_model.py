"""The causal language model: encode, score, and decode from a state."""

import math
from typing import Self, cast

import torch
from torch import nn

from dist_attn.mixers import MixerState, redraw_pools
from dist_attn.mixers.linear_layers import Linear, linear_layer
from dist_attn.mixers.narrow_layers import NarrowLayer, refuse_training
from dist_attn.model_config.language_model import LanguageModelConfig, LearnedPositions, mixers_of_layers
from dist_attn.models.blocks import Block, build_norm, contiguous_state, watched
from dist_attn.models.causal_model import CausalModel, ModelState
from dist_attn.models.dropout import Dropout
from dist_attn.models.encoder import position_layers, with_positions
from dist_attn.models.fused_step import FusedLayers
from dist_attn.models.model import Model
from dist_attn.ops import LocalSequenceOps, SequenceOps


class LanguageModel(CausalModel, Model):
    """Embedding, blocks, a final norm, and a read-out that shares the embedding's weights or has its own."""

    config: LanguageModelConfig

    def __init__(self, config: LanguageModelConfig) -> None:
        super().__init__()
        self.config = config
        self.hidden_size, self.vocab_size = config.hidden_size, config.vocab_size
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(
            Block(mixer, config.mlp_size, config.block) for mixer in mixers_of_layers(config.mixer, config.num_layers)
        )
        self.norm = build_norm(config.block.norm, config.hidden_size)
        self.position_embedding, self.position_map = position_layers(config.positions, config.hidden_size)
        self.dropout = Dropout()
        self.unembedding: nn.Linear | None = None
        if config.readout == "own":
            self.unembedding = Linear(config.hidden_size, config.vocab_size, bias=False)
        self._fused: FusedLayers | None = None
        self._initialise()

    @property
    def device(self) -> torch.device:
        device: torch.device = self.embedding.weight.device
        return device

    @property
    def parts(self) -> list[nn.Module]:
        return [part for block in self._blocks() for part in (block.mixer, block)]

    @property
    def kinds(self) -> list[str]:
        return [mixer.kind for mixer in mixers_of_layers(self.config.mixer, self.config.num_layers)]

    @property
    def learned_positions(self) -> int | None:
        kind = self.config.positions
        return kind.length if isinstance(kind, LearnedPositions) and kind.beyond == "refuse" else None

    @property
    def feature_seed(self) -> int | None:
        mixers = mixers_of_layers(self.config.mixer, self.config.num_layers)
        return next((mixer.seed for mixer in mixers if hasattr(mixer, "seed")), None)

    def hidden(
        self, tokens_BL: torch.Tensor, ops: SequenceOps | None = None, state: ModelState | None = None
    ) -> tuple[torch.Tensor, ModelState]:
        ops = LocalSequenceOps() if ops is None else ops
        tokens_BL = self.check(tokens_BL, ("batch", "length"), state)
        state = self.initial_state(tokens_BL.shape[0]) if state is None else state
        position_B = state.position_B + ops.total_length(tokens_BL.shape[1])
        positions_L = ops.positions(tokens_BL.shape[1], tokens_BL.device)
        x_BLD = self._embed(tokens_BL, state.position_B[:, None] + positions_L, position_B)
        x_BLD = self.dropout(x_BLD, ops)
        # A loop of its own: a call would hold the embedded tokens, which are as large as what the layers hand on.
        layers = []
        with ops.deferred_states():
            for block, before in zip(watched(self.blocks), state.layers, strict=True):
                x_BLD, after = block(x_BLD, ops, before)
                layers.append(contiguous_state(after))
        return self.norm(x_BLD), ModelState(tuple(layers), position_B)

    def readout(self, h: torch.Tensor) -> torch.Tensor:
        table: nn.Embedding | nn.Linear | NarrowLayer = self.embedding if self.unembedding is None else self.unembedding
        return table.project(h) if isinstance(table, NarrowLayer) else linear_layer(h, table.weight)

    def train(self, mode: bool = True) -> Self:
        """Raises: InputError for `mode` where weights are held in fewer bits; the model is then what it was."""
        if mode:
            refuse_training(self)
        return super().train(mode)

    def redraw(self, step: int) -> bool:
        """New random matrices from the mixers' pools for a training step; whether any layer has a pool.

        A state from before is then one of other features: begin with the initial one.
        """
        return redraw_pools(self, step)

    def initial_state(self, batch: int) -> ModelState:
        layers = tuple(block.mixer.initial_state(batch) for block in self._blocks())
        return ModelState(layers, torch.zeros(batch, dtype=torch.int64, device=self.device))

    def embed_step(self, token_B: torch.Tensor, state: ModelState) -> torch.Tensor:
        token_B = self.check(token_B, ("batch",), state)
        return self._embed(token_B, state.position_B, state.position_B + 1)

    def step_layers(self, x_BD: torch.Tensor, state: ModelState) -> tuple[torch.Tensor, tuple[MixerState, ...]]:
        if type(self) is LanguageModel and not torch.compiler.is_compiling():
            self._fused = fused = FusedLayers.of(self, x_BD, self._fused)
            stepped = None if fused is None else fused.run(x_BD, state.layers)
            if stepped is not None:
                return stepped
        states = []
        for block, before in zip(watched(self.blocks), state.layers, strict=True):
            x_BD, after = block.step(x_BD, before)
            states.append(contiguous_state(after))
        return self.readout(self.norm(x_BD)), tuple(states)

    def _embed(self, tokens: torch.Tensor, positions: torch.Tensor, end_B: torch.Tensor) -> torch.Tensor:
        """Tokens and their positions as vectors; `end_B` is where all ranks' tokens end."""
        x: torch.Tensor = self.embedding(tokens)
        layers = (self.position_embedding, self.position_map)
        return with_positions(x, positions, end_B, self.config.positions, layers)

    def _blocks(self) -> list[Block]:
        return cast(list[Block], list(self.blocks))

    def _initialise(self) -> None:
        deep = 0.02 / math.sqrt(2 * self.config.num_layers)
        for name, parameter in self.named_parameters():
            if name.endswith(("qkv.weight", "mlp_in.weight", "embedding.weight", "position_map.weight")):
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith(("out.weight", "mlp_out.weight")):
                nn.init.normal_(parameter, std=deep)
            elif name.endswith(("qkv.bias", "out.bias", "mlp_in.bias", "position_map.bias")):
                nn.init.zeros_(parameter)
