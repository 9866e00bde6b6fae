"""The configurations of encoders, classifiers and encoder-decoders: the frozen values of their config.json."""

from typing import Literal

from pydantic import Field, model_validator

from dist_attn.model_config.figures import GRAIN
from dist_attn.model_config.language_model import (
    MAX_LAYERS,
    BlockConfig,
    StackMixer,
    TokenPositions,
    check_streams,
    check_uses_all,
)
from dist_attn.model_config.mixers.attention import CrossConfig
from dist_attn.model_config.model import ModelConfig, register_model
from dist_attn.model_config.registry import FrozenConfig


class EncoderConfig(FrozenConfig):
    """A stack of blocks with positions, over any mixer, causal or bidirectional, or several kinds of them."""

    hidden_size: int = Field(ge=1)
    num_layers: int = Field(ge=1, le=MAX_LAYERS)
    mlp_size: int = Field(ge=1)
    mixer: StackMixer
    block: BlockConfig = BlockConfig()
    positions: Literal["none", "sinusoidal", "learned", "concatenated"] = "sinusoidal"
    # The number of positions with a learned vector; needed with learned positions, of no use without.
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
        """Return whether no token sees a later one."""
        return self.mixer.causal


class TextEncoderConfig(ModelConfig):
    """A model that makes one vector of a text of bounded length."""

    kind: Literal["text_encoder"] = "text_encoder"
    vocab_size: int = Field(ge=1)
    encoder: EncoderConfig
    # Vectors for the sentences of a pair, of which a text alone takes the first; 0: none.
    token_types: int = Field(default=0, ge=0)
    pooling: Literal["mean", "first"] = "mean"
    # Vectors have length 1.
    normalise: bool = False
    # The most tokens of a sequence, prefix and suffix included.
    max_tokens: int = Field(ge=1)
    # The tokens before and behind every text: BERT's [CLS] and [SEP].
    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()

    @model_validator(mode="after")
    def _fits(self) -> "TextEncoderConfig":
        if self.text_tokens < 1:
            raise ValueError(f"max_tokens {self.max_tokens} leaves no room for text beside prefix and suffix")
        if any(not 0 <= token < self.vocab_size for token in (*self.prefix, *self.suffix)):
            raise ValueError(f"prefix and suffix must be token ids below vocab_size {self.vocab_size}")
        longest = self.encoder.max_length
        if longest is not None and self.max_tokens > longest:
            raise ValueError(f"max_tokens {self.max_tokens} is over the encoder's max_length {longest}")
        if self.encoder.causal and self.pooling == "first":
            raise ValueError("under a causal mixer the first token has seen no other; take pooling = mean")
        return self

    @property
    def frame_tokens(self) -> int:
        """The number of tokens of prefix and suffix."""
        return len(self.prefix) + len(self.suffix)

    @property
    def text_tokens(self) -> int:
        """The most tokens of text in a sequence."""
        return self.max_tokens - self.frame_tokens


class ContextConfig(FrozenConfig):
    """Blocks that carry context along a text; every mixer goes on from a state."""

    num_layers: int = Field(ge=1, le=MAX_LAYERS)
    mlp_size: int = Field(ge=1)
    mixer: StackMixer
    block: BlockConfig = BlockConfig()

    @model_validator(mode="after")
    def _fits(self) -> "ContextConfig":
        check_uses_all(self.mixer, self.num_layers)
        check_streams(self.mixer, "stream encoder")
        if self.block.norm_placement != "pre":
            raise ValueError("context is added to hidden states as they are: norm_placement = pre")
        return self


class StreamEncoderConfig(ModelConfig):
    """A model of vectors along a text of any length: a sentence encoder reads blocks, and context goes on behind it."""

    kind: Literal["stream_encoder"] = "stream_encoder"
    sentence: TextEncoderConfig
    # Tokens of text that the sentence encoder reads together.
    block: int = Field(ge=1)
    # None: every block stands alone.
    context: ContextConfig | None = None

    @model_validator(mode="after")
    def _fits(self) -> "StreamEncoderConfig":
        if self.block > self.sentence.text_tokens:
            raise ValueError(f"block is {self.block}; the sentence encoder reads {self.sentence.text_tokens} at once")
        if GRAIN % self.block:
            raise ValueError(f"block is {self.block}; ranks are cut at multiples of {GRAIN}, which it must divide")
        if self.sentence.pooling != "mean":
            raise ValueError("rows are means over hidden states; take a sentence encoder whose pooling is mean")
        if self.context is not None and self.context.mixer.hidden_size != self.hidden_size:
            raise ValueError(
                f"the context's hidden_size {self.context.mixer.hidden_size} must equal the sentence encoder's "
                f"{self.hidden_size}"
            )
        return self

    @property
    def hidden_size(self) -> int:
        """The width of a hidden state."""
        return self.sentence.encoder.hidden_size

    @property
    def vocab_size(self) -> int:
        """The number of tokens in the vocabulary."""
        return self.sentence.vocab_size


class TextClassifierConfig(ModelConfig):
    """A model that chooses one of `num_classes` for a text, or for a pair of texts."""

    kind: Literal["text_classifier"] = "text_classifier"
    vocab_size: int = Field(ge=1)
    num_classes: int = Field(ge=1)
    # 2: both texts of a pair are read by the one encoder, and an MLP reads [h1, h2, h1 * h2, h1 - h2].
    texts: Literal[1, 2] = 1
    encoder: EncoderConfig
    pooling: Literal["mean", "class_token"] = "mean"


class ImageConfig(FrozenConfig):
    """The size of images, cut into square patches, row by row."""

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
        """The number of patches of an image, the length of its sequence."""
        return (self.height // self.patch) * (self.width // self.patch)

    @property
    def patch_size(self) -> int:
        """The number of values in a patch."""
        return self.channels * self.patch**2


class VisionClassifierConfig(ModelConfig):
    """A model that chooses one of `num_classes` for an image."""

    kind: Literal["vision_classifier"] = "vision_classifier"
    num_classes: int = Field(ge=1)
    image: ImageConfig
    encoder: EncoderConfig
    pooling: Literal["mean", "class_token"] = "class_token"


class MaskedAutoencoderConfig(ModelConfig):
    """A model that restores hidden patches from those that are not hidden."""

    kind: Literal["masked_autoencoder"] = "masked_autoencoder"
    image: ImageConfig
    encoder: EncoderConfig


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


register_model(TextEncoderConfig, "dist_attn.models.text_encoder:TextEncoder")
register_model(StreamEncoderConfig, "dist_attn.models.stream_encoder:StreamEncoder")
register_model(TextClassifierConfig, "dist_attn.models.classifier:TextClassifier")
register_model(VisionClassifierConfig, "dist_attn.models.vision:VisionClassifier")
register_model(MaskedAutoencoderConfig, "dist_attn.models.vision:MaskedAutoencoder")
register_model(EncoderDecoderConfig, "dist_attn.models.encoder_decoder:EncoderDecoder")
