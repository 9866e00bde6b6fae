"""From a model's configuration to the model."""

from typing import Annotated, overload

from pydantic import Field

from dist_attn.models.classifier import TextClassifier
from dist_attn.models.config import LanguageModelConfig
from dist_attn.models.encoder_config import (
    EncoderDecoderConfig,
    MaskedAutoencoderConfig,
    TextClassifierConfig,
    VisionClassifierConfig,
)
from dist_attn.models.encoder_decoder import EncoderDecoder
from dist_attn.models.language_model import LanguageModel
from dist_attn.models.million import MillionModel
from dist_attn.models.million_config import MillionConfig
from dist_attn.models.text_encoder import TextEncoder
from dist_attn.models.text_encoder_config import TextEncoderConfig
from dist_attn.models.vision import MaskedAutoencoder, VisionClassifier

__all__ = ["Model", "ModelConfig", "build_model"]

Model = (
    LanguageModel | TextEncoder | TextClassifier | VisionClassifier | MaskedAutoencoder | EncoderDecoder | MillionModel
)
ModelConfig = Annotated[
    LanguageModelConfig
    | TextEncoderConfig
    | TextClassifierConfig
    | VisionClassifierConfig
    | MaskedAutoencoderConfig
    | EncoderDecoderConfig
    | MillionConfig,
    Field(discriminator="kind"),
]


@overload
def build_model(config: LanguageModelConfig) -> LanguageModel: ...


@overload
def build_model(config: TextEncoderConfig) -> TextEncoder: ...


@overload
def build_model(config: ModelConfig) -> Model: ...


def build_model(config: ModelConfig) -> Model:
    """The model that `config.kind` names, with fresh parameters."""
    match config:
        case TextEncoderConfig():
            return TextEncoder(config)
        case TextClassifierConfig():
            return TextClassifier(config)
        case VisionClassifierConfig():
            return VisionClassifier(config)
        case MaskedAutoencoderConfig():
            return MaskedAutoencoder(config)
        case EncoderDecoderConfig():
            return EncoderDecoder(config)
        case MillionConfig():
            return MillionModel(config)
    return LanguageModel(config)
