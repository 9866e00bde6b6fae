"""The configurations of encoders and classifiers: the frozen values of their config.json."""

from typing import Literal

from pydantic import Field, model_validator

from dist_attn.model_config.figures import GRAIN
from dist_attn.model_config.language_model import (
    MAX_LAYERS,
    BlockConfig,
    StackMixer,
    check_streams,
    check_uses_all,
)
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


register_model(TextEncoderConfig, "dist_attn.models.text_encoder:TextEncoder")
register_model(StreamEncoderConfig, "dist_attn.models.stream_encoder:StreamEncoder")
register_model(TextClassifierConfig, "dist_attn.models.classifier:TextClassifier")
