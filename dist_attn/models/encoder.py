"""A stack of blocks over vectors that are there already: positions, blocks, norms; any mixer, any ranks."""

import math
from typing import cast

import torch
from torch import nn

from dist_attn.errors import InputError
from dist_attn.model_config.encoders import EncoderConfig
from dist_attn.model_config.hybrid import mixers_of_layers
from dist_attn.models.blocks import Block, build_norm
from dist_attn.models.positions import sinusoidal
from dist_attn.ops import SequenceOps, current_watch


class Encoder(nn.Module):
    """Hidden states of a whole sequence.

    Concatenated positions are a linear map of [x; sinusoids], which is the general form of adding them.

    Reference: Introduction to Transformers, Sec. 3 and 4 (position encodings).
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        size = config.hidden_size
        self.position_embedding = None if config.max_length is None else nn.Embedding(config.max_length, size)
        self.position_map = nn.Linear(2 * size, size) if config.positions == "concatenated" else None
        self.blocks = nn.ModuleList(
            Block(mixer, config.mlp_size, config.block) for mixer in mixers_of_layers(config.mixer, config.num_layers)
        )
        self.embedding_norm = build_norm(config.block.norm, size) if config.embedding_norm else None
        # Blocks that end with a norm leave nothing for a final one to do.
        self.norm = build_norm(config.block.norm, size) if config.block.norm_placement == "pre" else None

    def forward(self, x_BLD: torch.Tensor, ops: SequenceOps) -> torch.Tensor:
        """Hidden states after the last norm, [B, L, D] -> [B, L, D], of this process's slice.

        Documents packed into the sequence are each as if alone: positions begin anew in every one.

        Raises: InputError for a sequence longer than there are learned positions, on every rank.
        """
        watch = current_watch()
        x_BLD = self._with_positions(x_BLD, ops)
        if self.embedding_norm is not None:
            x_BLD = self.embedding_norm(x_BLD)
        for layer, block in enumerate(cast(list[Block], list(self.blocks))):
            if watch is not None:
                watch.layer = layer
            x_BLD, _ = block(x_BLD, ops)
        return x_BLD if self.norm is None else cast(torch.Tensor, self.norm(x_BLD))

    def _with_positions(self, x_BLD: torch.Tensor, ops: SequenceOps) -> torch.Tensor:
        if self.config.positions == "none":
            return x_BLD
        places = ops.document_places(x_BLD.shape[1])
        positions_L = places.position_L.to(x_BLD.device)
        if self.position_embedding is not None:
            total = max(places.lengths_N, default=0)
            if total > self.position_embedding.num_embeddings:
                raise InputError(
                    f"the sequence has {total} tokens; this model has learned positions for "
                    f"{self.position_embedding.num_embeddings}: give a shorter one, or train with a larger max_length"
                )
            return x_BLD + cast(torch.Tensor, self.position_embedding(positions_L))
        waves_LD = sinusoidal(positions_L, self.config.hidden_size).to(x_BLD.dtype)
        if self.position_map is None:
            return x_BLD + waves_LD
        mapped: torch.Tensor = self.position_map(torch.cat([x_BLD, waves_LD.expand_as(x_BLD)], dim=-1))
        return mapped


def initialise(model: nn.Module, num_layers: int) -> None:
    """Normal weights of deviation 0.02, those that write to the residual stream smaller by sqrt(2 layers)."""
    deep = 0.02 / math.sqrt(2 * num_layers)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 and name.endswith("weight"):
            nn.init.normal_(parameter, std=deep if name.endswith(("out.weight", "mlp_out.weight")) else 0.02)
        elif name.endswith(("_in.bias", "_out.bias", "head.bias", "map.bias", "projection.bias")):
            nn.init.zeros_(parameter)
