"""Language models of named sizes: tiny, small (about 38M parameters) and big (about 242M)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dist_attn.errors import ConfigError
from dist_attn.model_config.mixer import mixer_config_class


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
"""Mostly states of constant size, and now and then a look at every token so far."""


def expand_preset(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a model's configuration with those of its `preset` where nothing else is said.

    The mixer is `rfa_gate` with 64 random vectors unless the values name another. Of kind `hybrid` it is three of these
    and then `softmax`, unless a pattern is given, whose entries may be just the names of kinds.

    Raises: ConfigError for a preset or a kind of mixer that there is not, and for a pattern that is no list.
    Reference: Random Feature Attention, Sec. 4.1: about 38M and 242M parameters.
    """
    given = dict(values)
    if "preset" not in given:
        return given
    name = given.pop("preset")
    preset = PRESETS.get(name) if isinstance(name, str) else None
    if preset is None:
        raise ConfigError(f"there is no preset {name!r} of a model; there are {', '.join(PRESETS)}")
    sizes = {
        "hidden_size": preset.hidden_size,
        "num_layers": preset.num_layers,
        "mlp_size": preset.mlp_size,
    }
    expanded: dict[str, Any] = {**sizes, **given}
    expanded["mixer"] = _expand_mixer(given.get("mixer", {}), expanded["hidden_size"], preset.num_heads)
    return expanded


def _expand_mixer(mixer: Any, hidden_size: int, num_heads: int) -> Any:
    """With the width and, where the kind has them, the heads; so too every mixer of a pattern, which may be a word."""
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
