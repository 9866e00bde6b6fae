"""The configurations of models of images: the frozen values of their config.json."""

from typing import Literal

from pydantic import Field, model_validator

from dist_attn.model_config.encoders import EncoderConfig
from dist_attn.model_config.model import ModelConfig, register_model
from dist_attn.model_config.registry import FrozenConfig


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


register_model(VisionClassifierConfig, "dist_attn_papers.vision.model:VisionClassifier")
register_model(MaskedAutoencoderConfig, "dist_attn_papers.vision.model:MaskedAutoencoder")
