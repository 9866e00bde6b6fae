"""The model that a run begins with: fresh, that of a folder, or a classifier with the encoder of an auto-encoder."""

from pathlib import Path

from dist_attn.checkpoints import load_any_model
from dist_attn.errors import ConfigError
from dist_attn.models import (
    MaskedAutoencoder,
    MillionConfig,
    MillionModel,
    Model,
    ModelConfig,
    VisionClassifier,
    VisionClassifierConfig,
    build_model,
)

__all__ = ["first_model"]


def first_model(config: ModelConfig, begin_from: Path | None) -> Model:
    """The model of `config`, with the weights of the folder `begin_from` if there is one, in training mode.

    A vision classifier may begin from a masked auto-encoder of the same images and encoder: it takes the projection
    and the encoder, and begins with a fresh head. A million-scale model may begin from one whose Selector learns in
    another way or whose objective is another, as long as the parameters are the same.

    Raises: ConfigError where that folder is not of this model.
    """
    if begin_from is None:
        return build_model(config)
    model = load_any_model(begin_from)
    if isinstance(config, VisionClassifierConfig) and isinstance(model, MaskedAutoencoder):
        return _classifier(config, model, begin_from)
    if isinstance(config, MillionConfig) and isinstance(model, MillionModel):
        return _sparse(config, model, begin_from)
    if model.config != config:
        raise ConfigError(
            f"the model in {begin_from} is not the one of [model]; leave that section out to have the folder's"
        )
    return model.train()


def _sparse(config: MillionConfig, trained: MillionModel, folder: Path) -> MillionModel:
    free = {"selector", "objective"}
    if config.model_dump(exclude=free) != trained.config.model_dump(exclude=free) or (
        config.selector.hidden_size != trained.config.selector.hidden_size
    ):
        raise ConfigError(
            f"the model in {folder} differs from [model] in more than how its Selector learns (model.selector but its "
            "hidden_size, model.objective); give the same sizes"
        )
    model = MillionModel(config)
    model.load_state_dict(trained.state_dict())
    return model.train()


def _classifier(config: VisionClassifierConfig, pretrained: MaskedAutoencoder, folder: Path) -> VisionClassifier:
    for part in ("image", "encoder"):
        if getattr(config, part) != getattr(pretrained.config, part):
            raise ConfigError(
                f"the masked auto-encoder in {folder} has another model.{part}; a classifier that begins from it needs "
                "the same image and encoder"
            )
    model = VisionClassifier(config)
    model.projection.load_state_dict(pretrained.projection.state_dict())
    model.encoder.load_state_dict(pretrained.encoder.state_dict())
    return model.train()
