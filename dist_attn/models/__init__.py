"""Models over any token mixer, local or sharded."""

from dist_attn.models.build import build_model
from dist_attn.models.config import BlockConfig, LanguageModelConfig, LearnedPositions, MlpConfig, NormConfig
from dist_attn.models.language_model import LanguageModel, ModelState

__all__ = [
    "BlockConfig",
    "LanguageModel",
    "LanguageModelConfig",
    "LearnedPositions",
    "MlpConfig",
    "ModelState",
    "NormConfig",
    "build_model",
]
