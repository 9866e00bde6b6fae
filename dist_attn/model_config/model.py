"""The configuration of a model of any kind, and the registry of all kinds of models.

A kind is built in, or comes from an installed package: an entry point of the group `dist_attn.models`, named after the
kind, whose module calls `register_model` when it is loaded.
"""

from dataclasses import dataclass

from pydantic import SerializeAsAny

from dist_attn.model_config.registry import Build, KindConfig, Registry, kinds_of, place_of


@dataclass(frozen=True)
class ModelKind:
    """A configuration class, what makes the model of one of its values, and what prints its plan, if anything does."""

    config: "type[ModelConfig]"
    build: Build
    plan: Build | None


MODELS: Registry[ModelKind] = Registry("dist_attn.models", "model")


class ModelConfig(KindConfig):
    """The configuration of a model, as its folder's config.json holds it; `kind` is a Literal in every kind."""

    registry = MODELS


AnyModel = SerializeAsAny[ModelConfig]
"""The type of a field that holds a model of any kind, saved with all its options."""


def register_model(config: type[ModelConfig], build: Build, *, plan: Build | None = None) -> None:
    """Make a kind of model known; `build` makes the model, a torch module, of a configuration.

    `plan` prints what `dist-attn plan` tells, where that is not told of the costs of layers (`commands.plan`). Both are
    places as in `register_mixer`.

    Raises: ConfigError for a kind that is registered already, and for a class that names no kind.
    """
    MODELS.register(kinds_of(config), ModelKind(config, build, plan), place_of(config))
