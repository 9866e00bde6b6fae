"""The configuration of a model from one sequence to another: the frozen values of its config.json."""

from typing import Literal

from pydantic import Field, model_validator

from dist_attn.model_config.encoders import EncoderConfig
from dist_attn.model_config.language_model import (
    MAX_LAYERS,
    BlockConfig,
    StackMixer,
    TokenPositions,
    check_streams,
    check_uses_all,
)
from dist_attn.model_config.model import ModelConfig, register_model
from dist_attn.model_config.registry import FrozenConfig
from dist_attn_papers.mixers.cross_config import CrossConfig


class DecoderConfig(FrozenConfig):
    """A stack of causal self-attention, cross attention and MLP."""

    num_layers: int = Field(ge=1, le=MAX_LAYERS)
    mlp_size: int = Field(ge=1)
    mixer: StackMixer
    cross: CrossConfig
    block: BlockConfig = BlockConfig()
    positions: TokenPositions = "sinusoidal"

    @model_validator(mode="after")
    def _fits(self) -> "DecoderConfig":
        if self.block.residual != "sequential":
            raise ValueError("a decoder's attention, cross attention and MLP follow each other: residual = sequential")
        check_uses_all(self.mixer, self.num_layers)
        check_streams(self.mixer, "decoder")
        if self.block.norm_placement != "pre":
            raise ValueError("a decoder's norms stand before attention, cross attention and MLP: norm_placement = pre")
        return self


class EncoderDecoderConfig(ModelConfig):
    """A model from one sequence to another; the target's embedding is the read-out's, and also an absent source's."""

    kind: Literal["encoder_decoder"] = "encoder_decoder"
    vocab_size: int = Field(ge=1)
    # None: sources and targets share the vocabulary and its embedding.
    source_vocab_size: int | None = Field(default=None, ge=1)
    encoder: EncoderConfig
    decoder: DecoderConfig

    @model_validator(mode="after")
    def _one_width(self) -> "EncoderDecoderConfig":
        sizes = {self.encoder.hidden_size, self.decoder.mixer.hidden_size, self.decoder.cross.hidden_size}
        if len(sizes) > 1:
            raise ValueError(f"encoder, decoder and cross attention have the widths {sorted(sizes)}; they must be one")
        return self


register_model(EncoderDecoderConfig, "dist_attn_papers.translation.model:EncoderDecoder")
