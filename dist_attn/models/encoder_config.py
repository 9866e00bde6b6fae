"""What encoders, classifiers and encoder-decoders are made of: the frozen values of their config.json."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from dist_attn.mixers import BidirectionalConfig, CrossConfig, MixerConfig
from dist_attn.models.config import MAX_LAYERS, BlockConfig, TokenPositions
from dist_attn.models.mixer_stack import HybridConfig, check_streams, check_uses_all

__all__ = [
    "DecoderConfig",
    "EncoderConfig",
    "EncoderDecoderConfig",
    "ImageConfig",
    "MaskedAutoencoderConfig",
    "TextClassifierConfig",
    "VisionClassifierConfig",
]


class _Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class EncoderConfig(_Config):
    """A stack of blocks with positions, over any mixer, causal or bidirectional, or several kinds of them."""

    hidden_size: int = Field(ge=1)
    num_layers: int = Field(ge=1, le=MAX_LAYERS)
    mlp_size: int = Field(ge=1)
    mixer: MixerConfig | BidirectionalConfig | HybridConfig = Field(discriminator="kind")
    block: BlockConfig = BlockConfig()
    positions: Literal["none", "sinusoidal", "learned", "concatenated"] = "sinusoidal"
    # How many positions have a learned vector; needed with learned positions, of no use without.
    max_length: int | None = Field(default=None, ge=1)
    # A norm over the tokens with their positions, before the first block.
    embedding_norm: bool = False

    @model_validator(mode="after")
    def _fits(self) -> "EncoderConfig":
        if self.mixer.hidden_size != self.hidden_size:
            raise ValueError(f"the mixer's hidden_size {self.mixer.hidden_size} must equal {self.hidden_size}")
        check_uses_all(self.mixer, self.num_layers)
        if (self.positions == "learned") != (self.max_length is not None):
            raise ValueError("learned positions need max_length, and only they; give both or neither")
        return self

    @property
    def causal(self) -> bool:
        """Whether no token sees a later one."""
        return self.mixer.causal


class TextClassifierConfig(_Config):
    """One of `num_classes` for a text, or for a pair of texts."""

    kind: Literal["text_classifier"] = "text_classifier"
    vocab_size: int = Field(ge=1)
    num_classes: int = Field(ge=1)
    # 2: both texts of a pair are read by the one encoder, and an MLP reads [h1, h2, h1 * h2, h1 - h2].
    texts: Literal[1, 2] = 1
    encoder: EncoderConfig
    pooling: Literal["mean", "class_token"] = "mean"


class ImageConfig(_Config):
    """Images of one size, cut into square patches, row by row."""

    height: int = Field(ge=1)
    width: int = Field(ge=1)
    channels: int = Field(default=3, ge=1)
    patch: int = Field(ge=1)

    @model_validator(mode="after")
    def _patches_fit(self) -> "ImageConfig":
        if self.height % self.patch or self.width % self.patch:
            raise ValueError(f"an image of {self.height} x {self.width} is not cut evenly by patches of {self.patch}")
        return self

    @property
    def num_patches(self) -> int:
        """Patches of an image, the length of its sequence."""
        return (self.height // self.patch) * (self.width // self.patch)

    @property
    def patch_size(self) -> int:
        """Numbers in a patch."""
        return self.channels * self.patch**2


class VisionClassifierConfig(_Config):
    """One of `num_classes` for an image."""

    kind: Literal["vision_classifier"] = "vision_classifier"
    num_classes: int = Field(ge=1)
    image: ImageConfig
    encoder: EncoderConfig
    pooling: Literal["mean", "class_token"] = "class_token"


class MaskedAutoencoderConfig(_Config):
    """Patches that were hidden, from those that were not."""

    kind: Literal["masked_autoencoder"] = "masked_autoencoder"
    image: ImageConfig
    encoder: EncoderConfig


class DecoderConfig(_Config):
    """A stack of causal self-attention, cross attention and MLP."""

    num_layers: int = Field(ge=1, le=MAX_LAYERS)
    mlp_size: int = Field(ge=1)
    mixer: MixerConfig | HybridConfig = Field(discriminator="kind")
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


class EncoderDecoderConfig(_Config):
    """From one sequence to another; the target's embedding is the read-out's, and the source's where it has no own."""

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
