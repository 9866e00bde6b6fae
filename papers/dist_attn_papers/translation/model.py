"""A model from one sequence to another: an encoder, and a causal decoder with attention over the memory."""

from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

from dist_attn.errors import ShapeError
from dist_attn.mixers import MixerConfig, MixerState
from dist_attn.model_config.language_model import mixers_of_layers, with_layer_seed
from dist_attn.models.blocks import Block, Recomputable, build_norm
from dist_attn.models.dropout import Dropout
from dist_attn.models.encoder import Encoder, check_tokens, initialise, position_layers, with_positions
from dist_attn.models.model import Model
from dist_attn.ops import LocalSequenceOps, SequenceOps
from dist_attn_papers.mixers.cross import CrossAttention, MemoryState
from dist_attn_papers.translation.config import DecoderConfig, EncoderDecoderConfig


@dataclass(frozen=True)
class DecoderState:
    """The state of decoding: self-attention of the tokens so far, the absorbed memory, and the positions."""

    layers: tuple[MixerState, ...]
    memories: tuple[MemoryState, ...]
    position_B: torch.Tensor

    def select(self, index: list[int]) -> "DecoderState":
        """The state of some of the sequences, in any order and more than once: what a beam search asks for."""
        layers = tuple(s.replace(tuple(t[index] for t in s.tensors())) for s in self.layers)
        return DecoderState(layers, tuple(m.select(index) for m in self.memories), self.position_B[index])


class DecoderBlock(Recomputable):
    """x + self-attention, x + attention over the memory, x + MLP, each over normed tokens."""

    def __init__(self, config: DecoderConfig, layer: int, mixer: MixerConfig) -> None:
        super().__init__()
        self.block = Block(mixer, config.mlp_size, config.block)
        self.cross_norm = build_norm(config.block.norm, config.cross.hidden_size)
        self.cross = CrossAttention(with_layer_seed(config.cross, layer))
        self.cross_dropout = Dropout()

    def forward(
        self, x_BLD: torch.Tensor, memory_BSD: torch.Tensor, ops: SequenceOps, cross_ops: SequenceOps
    ) -> tuple[torch.Tensor, MixerState, MemoryState]:
        """The tokens after this layer, the mixer's state after the last one, and the absorbed memory."""
        return self._run(self._forward, x_BLD, memory_BSD, ops, cross_ops)

    def _forward(
        self, x_BLD: torch.Tensor, memory_BSD: torch.Tensor, ops: SequenceOps, cross_ops: SequenceOps
    ) -> tuple[torch.Tensor, MixerState, MemoryState]:
        mixed_BLD, after = self.block.mixer(self.block.mixer_norm(x_BLD), ops)
        x_BLD = x_BLD + self.block.mixer_dropout(mixed_BLD, ops)
        seen_BLD, memory = self.cross(self.cross_norm(x_BLD), memory_BSD, cross_ops)
        return self.block.feed_forward(x_BLD + self.cross_dropout(seen_BLD, ops), ops), after, memory

    def step(
        self, x_BD: torch.Tensor, state: MixerState, memory: MemoryState, position_B: torch.Tensor
    ) -> tuple[torch.Tensor, MixerState]:
        """`forward` for one token."""
        mixed_BD, after = self.block.mixer.step(self.block.mixer_norm(x_BD), state)
        x_BD = x_BD + mixed_BD
        seen_B1D = self.cross.read(self.cross_norm(x_BD)[:, None], memory, position_B[:, None])
        return self.block.feed_forward(x_BD + seen_B1D[:, 0]), after


class EncoderDecoder(Model):
    """Encoder over the source, causal decoder over the target; one embedding for the target and for the read-out.

    The source has the same one, or its own where it has a vocabulary of its own.

    Across ranks the source and the target each have a layout of their own. `source_ops` have the source's, `target_ops`
    the target's, and `cross_ops` both: the target's, with the source's as memory layout.

    Reference: Random Feature Attention, Sec. 4.2 (softmax encoder, RFA in the decoder); Scaleformer, Sec. 2.
    """

    config: EncoderDecoderConfig

    def __init__(self, config: EncoderDecoderConfig) -> None:
        super().__init__()
        self.config = config
        size = config.encoder.hidden_size
        self.embedding = nn.Embedding(config.vocab_size, size)
        self.source_embedding: nn.Embedding | None = None
        if config.source_vocab_size is not None:
            self.source_embedding = nn.Embedding(config.source_vocab_size, size)
        self.encoder = Encoder(config.encoder)
        mixers = mixers_of_layers(config.decoder.mixer, config.decoder.num_layers)
        self.blocks = nn.ModuleList(DecoderBlock(config.decoder, layer, mixer) for layer, mixer in enumerate(mixers))
        self.norm = build_norm(config.decoder.block.norm, size)
        self.dropout = Dropout()
        self.position_embedding, self.position_map = position_layers(config.decoder.positions, size)
        initialise(self, config.encoder.num_layers + config.decoder.num_layers)

    def encode(self, source_BS: torch.Tensor, ops: SequenceOps | None = None) -> torch.Tensor:
        """The memory, [B, S] -> [B, S, D], of this process's slice of the source."""
        embedding = self.embedding if self.source_embedding is None else self.source_embedding
        device = embedding.weight.device
        source_BS = check_tokens(source_BS, ("batch", "length"), embedding.num_embeddings, device)
        x_BSD = embedding(source_BS)
        memory_BSD: torch.Tensor = self.encoder(x_BSD, LocalSequenceOps() if ops is None else ops)
        return memory_BSD

    def decode(
        self,
        target_BL: torch.Tensor,
        memory_BSD: torch.Tensor,
        target_ops: SequenceOps | None = None,
        cross_ops: SequenceOps | None = None,
    ) -> tuple[torch.Tensor, DecoderState]:
        """Logits of the token after each target token, [B, L, vocabulary], and the state after the last global one.

        The state, from a first token or from more, is what `step` goes on from: of constant size, and equal on all
        ranks, where mixer and cross attention are kernels.

        Raises: ShapeError, TokenError for targets that are no tokens or of another batch than the memory; InputError
            for more of them than there are learned positions.
        """
        device = self.embedding.weight.device
        target_BL = check_tokens(target_BL, ("batch", "length"), self.config.vocab_size, device)
        if len(target_BL) != len(memory_BSD):
            raise ShapeError(f"{len(target_BL)} targets came with the memory of {len(memory_BSD)} sources")
        target_ops = LocalSequenceOps() if target_ops is None else target_ops
        cross_ops = LocalSequenceOps() if cross_ops is None else cross_ops
        length = target_BL.shape[1]
        total = target_ops.total_length(length)
        position_B = torch.full((len(target_BL),), total, dtype=torch.int64, device=device)
        x_BLD = self._embed(target_BL, target_ops.positions(length, device), position_B)
        x_BLD = self.dropout(x_BLD, target_ops)
        layers, memories = [], []
        for block in cast(list[DecoderBlock], list(self.blocks)):
            x_BLD, after, memory = block(x_BLD, memory_BSD, target_ops, cross_ops)
            layers.append(after)
            memories.append(memory)
        return self._readout(x_BLD), DecoderState(tuple(layers), tuple(memories), position_B)

    def forward(self, source_BS: torch.Tensor, target_BL: torch.Tensor) -> torch.Tensor:
        """Logits of whole sequences on one process, [B, L, vocabulary]."""
        return self.decode(target_BL, self.encode(source_BS))[0]

    def step(self, token_B: torch.Tensor, state: DecoderState) -> tuple[torch.Tensor, DecoderState]:
        """Feed one target token to each sequence: the logits of the next one, [B, vocabulary], and the state after it.

        Raises: as `decode`; InputError where the memory's keys are needed and spread over ranks.
        """
        token_B = check_tokens(token_B, ("batch",), self.config.vocab_size, self.embedding.weight.device)
        x_BD = self._embed(token_B, state.position_B, state.position_B + 1)
        layers = []
        blocks = cast(list[DecoderBlock], list(self.blocks))
        for block, before, memory in zip(blocks, state.layers, state.memories, strict=True):
            x_BD, after = block.step(x_BD, before, memory, state.position_B)
            layers.append(after)
        return self._readout(x_BD), DecoderState(tuple(layers), state.memories, state.position_B + 1)

    def _embed(self, tokens: torch.Tensor, positions: torch.Tensor, end_B: torch.Tensor) -> torch.Tensor:
        """Tokens and their positions as vectors; `end_B` is where all ranks' tokens end."""
        layers = (self.position_embedding, self.position_map)
        return with_positions(self.embedding(tokens), positions, end_B, self.config.decoder.positions, layers)

    def _readout(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.norm(x), self.embedding.weight)
