"""From a model's configuration to the model."""

from typing import Any, overload

from dist_attn.model_config.encoders import (
    EncoderDecoderConfig,
    MaskedAutoencoderConfig,
    TextClassifierConfig,
    TextEncoderConfig,
    VisionClassifierConfig,
)
from dist_attn.model_config.folder import ModelConfig
from dist_attn.model_config.language_model import LanguageModelConfig
from dist_attn.model_config.million import MillionConfig
from dist_attn.models.classifier import TextClassifier
from dist_attn.models.encoder_decoder import EncoderDecoder
from dist_attn.models.language_model import LanguageModel
from dist_attn.models.million import MillionModel
from dist_attn.models.text_encoder import TextEncoder
from dist_attn.models.vision import MaskedAutoencoder, VisionClassifier

Model = (
    LanguageModel | TextEncoder | TextClassifier | VisionClassifier | MaskedAutoencoder | EncoderDecoder | MillionModel
)

_MODELS: dict[type, Any] = {
    LanguageModelConfig: LanguageModel,
    TextEncoderConfig: TextEncoder,
    TextClassifierConfig: TextClassifier,
    VisionClassifierConfig: VisionClassifier,
    MaskedAutoencoderConfig: MaskedAutoencoder,
    EncoderDecoderConfig: EncoderDecoder,
    MillionConfig: MillionModel,
}


@overload
def build_model(config: LanguageModelConfig) -> LanguageModel: ...


@overload
def build_model(config: TextEncoderConfig) -> TextEncoder: ...


@overload
def build_model(config: ModelConfig) -> Model: ...


def build_model(config: ModelConfig) -> Model:
    """The model that `config.kind` names, with fresh parameters."""
    model: Model = _MODELS[type(config)](config)
    return model
