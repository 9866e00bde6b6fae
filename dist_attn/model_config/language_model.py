"""The configuration of a language model: the frozen value in config.json, each layer's mixer, and named sizes.

The presets are tiny, small (about 38M parameters) and big (about 242M).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, PlainValidator, SerializeAsAny, model_validator

from dist_attn.errors import ConfigError
from dist_attn.model_config.mixer import AnyMixer, MixerConfig, mixer_config_class
from dist_attn.model_config.model import ModelConfig, register_model
from dist_attn.model_config.registry import FrozenConfig
from dist_attn.shipped import OUR_MODEL_TYPE

Config = TypeVar("Config", bound=FrozenConfig)


class HybridConfig(FrozenConfig):
    """A pattern of mixers: layer after layer takes the next one, beginning again behind the last.

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
        """The width of every mixer."""
        return self.pattern[0].hidden_size

    @property
    def causal(self) -> bool:
        """Return whether no token sees a later one, in any layer."""
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
                "goes on from a state, as rfa_gate, convolution or s4d as a scan do"
            )


def mixers_of_layers(mixer: MixerConfig | HybridConfig, num_layers: int) -> tuple[MixerConfig, ...]:
    """List the mixer of each layer, with that layer's seed."""
    pattern = pattern_of(mixer)
    return tuple(with_layer_seed(pattern[layer % len(pattern)], layer) for layer in range(num_layers))


def with_layer_seed(mixer: Config, layer: int) -> Config:
    """Give a layer's mixer its own seed: equal random vectors in all layers would correlate their estimation errors."""
    return mixer.model_copy(update={"seed": mixer.seed + layer}) if hasattr(mixer, "seed") else mixer


def pattern_of(mixer: MixerConfig | HybridConfig) -> tuple[MixerConfig, ...]:
    """The mixers that layers take in turn."""
    return mixer.pattern if isinstance(mixer, HybridConfig) else (mixer,)


MAX_LAYERS = 10_000
"""The most layers. More are a mistake: they would be built one by one until memory ends."""

CODE_NAME = "modeling_dist_attn"
"""The module in a model folder from which transformers takes the classes of `dist_attn.hf`, where it is told to."""

_CLASSES = {"Config": "DistAttnConfig", "Model": "DistAttnModel", "ModelForCausalLM": "DistAttnForCausalLM"}
NAMES_FOR_OTHERS = {
    "model_type": OUR_MODEL_TYPE,
    "architectures": ["DistAttnForCausalLM"],
    "auto_map": {f"Auto{kind}": f"{CODE_NAME}.{name}" for kind, name in _CLASSES.items()},
}
"""The keys of a language model's config.json that are for transformers."""

_KEYS_OF_OTHERS = frozenset({
    "auto_map", "bos_token_id", "dtype", "eos_token_id", "pad_token_id", "transformers_version",
})  # fmt: skip

CODE_FOR_OTHERS = f'''"""The classes that transformers loads with trust_remote_code=True; dist-attn is needed."""

from dist_attn.hf import {", ".join(sorted(_CLASSES.values()))}

__all__ = {json.dumps(sorted(_CLASSES.values()))}
'''


class NormConfig(FrozenConfig):
    """A norm of each token's features to mean 0 and variance 1 (`layer`) or to a mean square of 1 (`rms`)."""

    kind: Literal["layer", "rms"] = "layer"
    eps: float = Field(default=1e-5, gt=0, allow_inf_nan=False)


class MlpConfig(FrozenConfig):
    """An MLP: out(f(in(x))), or out(f(gate(x)) * in(x)), where gate and in lie one above the other in one matrix."""

    kind: Literal["plain", "gated"] = "plain"
    activation: Literal["gelu", "gelu_tanh", "silu", "relu"] = "gelu_tanh"
    bias: bool = True


class BlockConfig(FrozenConfig):
    """The parts around the mixer in a layer; `parallel`: the MLP reads the layer's input, not the mixer's output.

    `norm_placement`: norms before the mixer and the MLP (`pre`), or after each has been added to its input (`post`).
    """

    norm: NormConfig = NormConfig()
    norm_placement: Literal["pre", "post"] = "pre"
    mlp: MlpConfig = MlpConfig()
    residual: Literal["sequential", "parallel"] = "sequential"

    @model_validator(mode="after")
    def _norms_have_a_place(self) -> "BlockConfig":
        if self.norm_placement == "post" and self.residual == "parallel":
            raise ValueError("norms after mixer and MLP need these one after the other: residual = sequential")
        return self


class LearnedPositions(FrozenConfig):
    """A vector for each of the first `length` positions; longer texts are refused, or begin again with the first."""

    kind: Literal["learned"] = "learned"
    length: int = Field(ge=1)
    beyond: Literal["refuse", "repeat"] = "refuse"


TokenPositions = Literal["none", "sinusoidal", "concatenated"] | LearnedPositions
"""The positions of tokens that a state goes on from: none, sinusoids added or behind the token, learned vectors."""


class LanguageModelConfig(ModelConfig):
    """A causal language model over any mixer that goes on from a state, or several kinds of them."""

    kind: Literal["language_model"] = "language_model"
    vocab_size: int = Field(ge=1)
    hidden_size: int = Field(ge=1)
    num_layers: int = Field(ge=1, le=MAX_LAYERS)
    mlp_size: int = Field(ge=1)
    mixer: StackMixer
    positions: TokenPositions = "none"
    block: BlockConfig = BlockConfig()
    # The read-out has the embedding's weights, or a matrix of its own.
    readout: Literal["tied", "own"] = "tied"

    @model_validator(mode="before")
    @classmethod
    def _names_for_others(cls, values: Any) -> Any:
        """Leave out the keys that are for transformers: its classes (`dist_attn.hf`) and tokens, and what it adds."""
        if not isinstance(values, dict):
            return values
        ours = {key: value for key, value in values.items() if key not in _KEYS_OF_OTHERS}
        return {key: value for key, value in ours.items() if (key, value) not in NAMES_FOR_OTHERS.items()}

    @model_validator(mode="after")
    def _sizes_agree(self) -> "LanguageModelConfig":
        if self.mixer.hidden_size != self.hidden_size:
            raise ValueError(
                f"the mixer's hidden_size {self.mixer.hidden_size} must equal the model's {self.hidden_size}"
            )
        check_uses_all(self.mixer, self.num_layers)
        check_streams(self.mixer, "language model")
        return self


@dataclass(frozen=True)
class Preset:
    """The sizes of a model; its vocabulary is that of the tokeniser."""

    hidden_size: int
    num_layers: int
    num_heads: int
    mlp_size: int


# small and big: widths of the transformer's base and big models; with 38,500 tokens, embeddings counted, their layers
# come to the paper's 38M and 242M, for which it does not print the parts.
PRESETS = {
    "tiny": Preset(hidden_size=128, num_layers=4, num_heads=4, mlp_size=512),
    "small": Preset(hidden_size=512, num_layers=6, num_heads=8, mlp_size=2048),
    "big": Preset(hidden_size=1024, num_layers=16, num_heads=16, mlp_size=4096),
}

HYBRID_PATTERN = ("rfa_gate", "rfa_gate", "rfa_gate", "softmax")
"""A pattern of mostly states of constant size, and now and then a look at every token so far."""


def expand_preset(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in the values of a model's configuration from its `preset`, where nothing else is said.

    The mixer is `rfa_gate` with 64 random vectors unless the values name another. Of kind `hybrid` it is three of these
    and then `softmax`, unless a pattern is given, whose entries may be just the names of kinds.

    Raises: ConfigError for a preset or a kind of mixer that there is not, and for a pattern that is no list.
    Reference: Random Feature Attention, Sec. 4.1: about 38M and 242M parameters.
    """
    options = dict(values)
    if "preset" not in options:
        return options
    name = options.pop("preset")
    preset = PRESETS.get(name) if isinstance(name, str) else None
    if preset is None:
        raise ConfigError(f"there is no preset {name!r} of a model; there are {', '.join(PRESETS)}")
    sizes = {
        "hidden_size": preset.hidden_size,
        "num_layers": preset.num_layers,
        "mlp_size": preset.mlp_size,
    }
    expanded: dict[str, Any] = {**sizes, **options}
    expanded["mixer"] = _expand_mixer(options.get("mixer", {}), expanded["hidden_size"], preset.num_heads)
    return expanded


def _expand_mixer(mixer: Any, hidden_size: int, num_heads: int) -> Any:
    """Add the width and, where the kind has them, the heads; also to each mixer of a pattern, which may be a word."""
    if not isinstance(mixer, Mapping):
        return mixer
    if "pattern" in mixer or mixer.get("kind") == "hybrid":
        pattern = mixer.get("pattern", HYBRID_PATTERN)
        if not isinstance(pattern, list | tuple):
            raise ConfigError(f"the mixer's pattern is {pattern!r}; a pattern is a list of mixers or of their kinds")
        named = [{"kind": one} if isinstance(one, str) else one for one in pattern]
        return {"kind": "hybrid", **mixer, "pattern": [_expand_mixer(one, hidden_size, num_heads) for one in named]}
    own: dict[str, Any] = {"kind": "rfa_gate", "hidden_size": hidden_size, **mixer}
    heads = mixer_config_class(own["kind"]).model_fields.get("num_heads")
    return {**({"num_heads": num_heads} if heads is not None and heads.is_required() else {}), **own}


register_model(LanguageModelConfig, "dist_attn.models.language_model:LanguageModel")
