"""From a model's configuration to the model."""

from dist_attn.models.config import LanguageModelConfig
from dist_attn.models.language_model import LanguageModel

__all__ = ["build_model"]


def build_model(config: LanguageModelConfig) -> LanguageModel:
    """The model that `config` describes, with fresh parameters."""
    return LanguageModel(config)
