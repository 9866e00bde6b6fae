"""What a text encoder is made of: the frozen value of its config.json."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from dist_attn.models.encoder_config import EncoderConfig

__all__ = ["TextEncoderConfig"]


class TextEncoderConfig(BaseModel):
    """One vector for a text of bounded length."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["text_encoder"] = "text_encoder"
    vocab_size: int = Field(ge=1)
    encoder: EncoderConfig
    # Vectors for the sentences of a pair, of which a text alone takes the first; 0: none.
    token_types: int = Field(default=0, ge=0)
    pooling: Literal["mean", "first"] = "mean"
    # Vectors have length 1.
    normalise: bool = False
    # Tokens of a sequence at most, prefix and suffix included.
    max_tokens: int = Field(ge=1)
    # What stands before and behind every text: BERT's [CLS] and [SEP].
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
    def text_tokens(self) -> int:
        """Tokens of text in a sequence at most."""
        return self.max_tokens - len(self.prefix) - len(self.suffix)
