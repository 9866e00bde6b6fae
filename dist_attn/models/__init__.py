"""Models over any token mixer, local or sharded."""

from dist_attn.models.build import build_model
from dist_attn.models.config import LanguageModelConfig
from dist_attn.models.language_model import LanguageModel, ModelState

__all__ = ["LanguageModel", "LanguageModelConfig", "ModelState", "build_model"]
