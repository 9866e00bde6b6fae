"""What a model is made of: the frozen value that a model folder's config.json holds."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from dist_attn.mixers import MixerConfig

__all__ = ["LanguageModelConfig"]


class LanguageModelConfig(BaseModel):
    """A causal language model over any causal mixer."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["language_model"] = "language_model"
    vocab_size: int = Field(ge=1)
    hidden_size: int = Field(ge=1)
    num_layers: int = Field(ge=1)
    mlp_size: int = Field(ge=1)
    mixer: MixerConfig
    positions: Literal["none", "sinusoidal"] = "none"

    @model_validator(mode="after")
    def _sizes_agree(self) -> "LanguageModelConfig":
        if self.mixer.hidden_size != self.hidden_size:
            raise ValueError(
                f"the mixer's hidden_size {self.mixer.hidden_size} must equal the model's {self.hidden_size}"
            )
        return self
