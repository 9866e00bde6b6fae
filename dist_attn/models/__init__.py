"""Models over any token mixer, local or sharded."""

from typing import overload

from dist_attn.model_config.encoders import (
    ContextConfig,
    EncoderConfig,
    StreamEncoderConfig,
    TextClassifierConfig,
    TextEncoderConfig,
)
from dist_attn.model_config.language_model import (
    BlockConfig,
    HybridConfig,
    LanguageModelConfig,
    LearnedPositions,
    MlpConfig,
    NormConfig,
)
from dist_attn.model_config.model import MODELS, ModelConfig
from dist_attn.model_config.registry import load_build
from dist_attn.models.causal_model import CausalModel, ModelState, StreamingModel
from dist_attn.models.classifier import TextClassifier
from dist_attn.models.encoder import Encoder
from dist_attn.models.language_model import LanguageModel
from dist_attn.models.model import Model, SequenceModel
from dist_attn.models.stream_encoder import StreamEncoder
from dist_attn.models.text_encoder import TextEncoder
from dist_attn.models.weight_precision import (
    WeightReport,
    check_precision,
    hold_weights_as,
    weight_bytes,
    weight_precision_of,
)

__all__ = [
    "BlockConfig",
    "CausalModel",
    "ContextConfig",
    "Encoder",
    "EncoderConfig",
    "HybridConfig",
    "LanguageModel",
    "LanguageModelConfig",
    "LearnedPositions",
    "MlpConfig",
    "Model",
    "ModelConfig",
    "ModelState",
    "NormConfig",
    "SequenceModel",
    "StreamEncoder",
    "StreamEncoderConfig",
    "StreamingModel",
    "TextClassifier",
    "TextClassifierConfig",
    "TextEncoder",
    "TextEncoderConfig",
    "WeightReport",
    "build_model",
    "check_precision",
    "hold_weights_as",
    "weight_bytes",
    "weight_precision_of",
]


@overload
def build_model(config: LanguageModelConfig) -> LanguageModel: ...


@overload
def build_model(config: TextEncoderConfig) -> TextEncoder: ...


@overload
def build_model(config: StreamEncoderConfig) -> StreamEncoder: ...


@overload
def build_model(config: ModelConfig) -> Model: ...


def build_model(config: ModelConfig) -> Model:
    """The model that `config.kind` names, with fresh parameters."""
    model: Model = load_build(MODELS.find(config.kind).build)(config)
    return model
