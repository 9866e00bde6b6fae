"""The model that a run begins with: fresh, or that of a folder."""

from pathlib import Path

from dist_attn.checkpoints import load_any_model
from dist_attn.errors import ConfigError
from dist_attn.models import Model, ModelConfig, build_model

__all__ = ["first_model"]


def first_model(config: ModelConfig, begin_from: Path | None) -> Model:
    """The model of `config`, with the weights of the folder `begin_from` if there is one, in training mode.

    Raises: ConfigError where that folder is not of this model.
    """
    if begin_from is None:
        return build_model(config)
    model = load_any_model(begin_from)
    if model.config != config:
        raise ConfigError(
            f"the model in {begin_from} is not the one of [model]; leave that section out to have the folder's"
        )
    return model.train()
