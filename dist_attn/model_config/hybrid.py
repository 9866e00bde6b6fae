"""Which mixer each layer of a stack has: one kind in all of them, or several kinds in a pattern."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, PlainValidator, SerializeAsAny, model_validator

from dist_attn.model_config.mixer import AnyMixer, FrozenConfig, MixerConfig

Config = TypeVar("Config", bound=FrozenConfig)


class HybridConfig(FrozenConfig):
    """Layer after layer takes the next mixer of `pattern`, which begins again behind its last one.

    With one mixer for each layer it is a list of them.
    """

    kind: Literal["hybrid"] = "hybrid"
    pattern: tuple[AnyMixer, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _one_width(self) -> "HybridConfig":
        sizes = [mixer.hidden_size for mixer in self.pattern]
        if len(set(sizes)) > 1:
            raise ValueError(f"the mixers of the pattern have the hidden_size {sizes}; they must have the same")
        return self

    @property
    def hidden_size(self) -> int:
        """That of every mixer."""
        return self.pattern[0].hidden_size

    @property
    def causal(self) -> bool:
        """Whether no token sees a later one, in any layer."""
        return all(mixer.causal for mixer in self.pattern)


def _one_or_several(values: Any) -> MixerConfig | HybridConfig:
    if isinstance(values, HybridConfig) or (isinstance(values, Mapping) and values.get("kind") == "hybrid"):
        return HybridConfig.model_validate(values)
    return MixerConfig.model_validate(values)


StackMixer = Annotated[SerializeAsAny[MixerConfig | HybridConfig], PlainValidator(_one_or_several)]
"""The mixer of all layers, or a pattern of them."""


def check_uses_all(mixer: FrozenConfig, num_layers: int) -> None:
    """Raises: ValueError for a pattern with mixers that no layer takes."""
    if isinstance(mixer, HybridConfig) and len(mixer.pattern) > num_layers:
        raise ValueError(
            f"the mixer's pattern has {len(mixer.pattern)} entries for {num_layers} layers; it needs one for each, or "
            "fewer, which repeat"
        )


def check_streams(mixer: MixerConfig | HybridConfig, model: str) -> None:
    """Raises: ValueError where a layer could not go on from a state, as `model` must to generate."""
    for place, one in enumerate(pattern_of(mixer)):
        if not one.streams:
            where = f" in entry {place} of the pattern" if isinstance(mixer, HybridConfig) else ""
            raise ValueError(
                f"a mixer of kind {one.kind} as configured{where} takes a sequence whole; a {model} needs one that "
                "goes on from a state, as rfa_gate, scaleformer, convolution or s4d as a scan do"
            )


def mixers_of_layers(mixer: MixerConfig | HybridConfig, num_layers: int) -> tuple[MixerConfig, ...]:
    """The mixer of each layer, with that layer's seed."""
    pattern = pattern_of(mixer)
    return tuple(with_layer_seed(pattern[layer % len(pattern)], layer) for layer in range(num_layers))


def with_layer_seed(mixer: Config, layer: int) -> Config:
    """The mixer of one layer: the same random vectors everywhere would correlate the layers' estimation errors."""
    return mixer.model_copy(update={"seed": mixer.seed + layer}) if hasattr(mixer, "seed") else mixer


def pattern_of(mixer: MixerConfig | HybridConfig) -> tuple[MixerConfig, ...]:
    """The mixers that layers take in turn."""
    return mixer.pattern if isinstance(mixer, HybridConfig) else (mixer,)
