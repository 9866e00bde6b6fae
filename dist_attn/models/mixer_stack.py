"""Which mixer each layer of a stack has: one kind in all of them, or several kinds in a pattern."""

from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from dist_attn.mixers import BidirectionalConfig, MixerConfig

__all__ = ["HybridConfig", "check_streams", "check_uses_all", "mixers_of_layers", "with_layer_seed"]

LayerMixer = Annotated[MixerConfig | BidirectionalConfig, Field(discriminator="kind")]
Config = TypeVar("Config", bound=BaseModel)


class HybridConfig(BaseModel):
    """Layer after layer takes the next mixer of `pattern`, which begins again behind its last one.

    With one mixer for each layer it is a list of them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["hybrid"] = "hybrid"
    pattern: tuple[LayerMixer, ...] = Field(min_length=1)

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


def check_uses_all(mixer: BaseModel, num_layers: int) -> None:
    """Raises: ValueError for a pattern with mixers that no layer takes."""
    if isinstance(mixer, HybridConfig) and len(mixer.pattern) > num_layers:
        raise ValueError(
            f"the mixer's pattern has {len(mixer.pattern)} entries for {num_layers} layers; it needs one for each, or "
            "fewer, which repeat"
        )


def check_streams(mixer: LayerMixer | HybridConfig, model: str) -> None:
    """Raises: ValueError where a layer could not go on from a state, as `model` must to generate."""
    for place, one in enumerate(_pattern(mixer)):
        if not one.streams:
            where = f" in entry {place} of the pattern" if isinstance(mixer, HybridConfig) else ""
            raise ValueError(
                f"a mixer of kind {one.kind} as configured{where} takes a sequence whole; a {model} needs one that "
                "goes on from a state, as rfa_gate, scaleformer, convolution or s4d as a scan do"
            )


def mixers_of_layers(mixer: LayerMixer | HybridConfig, num_layers: int) -> tuple[LayerMixer, ...]:
    """The mixer of each layer, with that layer's seed."""
    pattern = _pattern(mixer)
    return tuple(with_layer_seed(pattern[layer % len(pattern)], layer) for layer in range(num_layers))


def with_layer_seed(mixer: Config, layer: int) -> Config:
    """The mixer of one layer: the same random vectors everywhere would correlate the layers' estimation errors."""
    return mixer.model_copy(update={"seed": mixer.seed + layer}) if hasattr(mixer, "seed") else mixer


def _pattern(mixer: LayerMixer | HybridConfig) -> tuple[LayerMixer, ...]:
    return mixer.pattern if isinstance(mixer, HybridConfig) else (mixer,)
