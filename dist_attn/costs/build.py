"""From a mixer's part of config.json to its formulas."""

from collections.abc import Mapping
from math import ceil, log2
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from dist_attn.costs.all_keys import KernelOverAllKeys, RelativeOverAllKeys, SoftmaxOverAllKeys
from dist_attn.costs.dense_space import DenseStateSpace
from dist_attn.costs.input_independent import CausalConvolution, DiagonalStateSpace
from dist_attn.costs.legs import LegsMemory
from dist_attn.costs.mixers import KernelAttention, LayerCosts, MixerCosts, SoftmaxAttention
from dist_attn.costs.relative_attention import RelativeAttention
from dist_attn.costs.whole_sequence import CentredConvolution, FourierMixing, LongConvolution, TokenMlp
from dist_attn.errors import ConfigError

__all__ = ["Count", "MixerNumbers", "layer_costs", "mixer_costs"]

Count = Annotated[int, Meta(ge=1, le=1 << 40)]


class _RelativeConfig(msgspec.Struct, frozen=True):
    reach: Annotated[int, Meta(ge=0)] = 16
    values: bool = True
    shared: bool = False


class MixerNumbers(msgspec.Struct, frozen=True):
    """What of a mixer's configuration its costs depend on; the defaults are those of the configuration."""

    kind: str
    num_heads: Count = 0  # that of a mixer without heads; where there are heads, it must be given
    short_convolution: Annotated[int, Meta(ge=0)] = 4
    num_random: Count = 64
    feature: str = "gaussian"
    projection_bias: bool = False
    rotary: dict[str, float] | None = None
    gated: bool = False
    shared_gate: bool = False
    weighting: str = "unit_norm"
    value_rank: Count | None = None
    reach: Annotated[int, Meta(ge=0)] = 16
    relative: _RelativeConfig | None = None
    taps: Count = 16
    centred: bool = False
    state_size: Count | None = None
    form: str = "scan"
    outputs: Count = 1
    transition: str = "fixed"
    bidirectional: bool = False
    attention: str = ""  # of the kind bidirectional
    piece: Count = 64
    length: Count = 1
    token_mlp_size: Count = 1
    pattern: tuple["MixerNumbers", ...] = ()  # of a hybrid stack


def layer_costs(values: Mapping[str, Any]) -> LayerCosts:
    """The costs of a mixer of any kind, by the values of its configuration, with a state or without.

    Raises: ConfigError for values that are no mixer's, and for a kind without a formula here.
    """
    try:
        mixer = msgspec.convert(values, MixerNumbers)
        size = msgspec.convert(values.get("hidden_size"), Count)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"these values are not the configuration of a mixer: {error}") from None
    sides = 2 if mixer.bidirectional else 1
    match mixer.kind, mixer.form:
        case "convolution", _ if mixer.centred:
            return CentredConvolution(size, mixer.taps)
        case "s4d", "convolution":
            modes = (mixer.state_size or 64) // 2
            return LongConvolution(size, sides * size * (1 + 4 * modes), 8.0 * modes, sides, 2)
        case "s4", "convolution":
            modes = (mixer.state_size or 64) // 2
            return LongConvolution(size, sides * size * (1 + 8 * modes), 32.0 * modes, sides, 2)
        case "sgconv", _:
            scales = 1 + ceil(log2(max(1.0, mixer.length / mixer.piece)))
            return LongConvolution(size, sides * scales * size * mixer.piece, 2.0, sides, 1)
        case "fnet", _:
            return FourierMixing(size)
        case "mlp_mixer", _:
            return TokenMlp(size, mixer.length, mixer.token_mlp_size)
        case ("bidirectional", _) | ("static_kernel", _) if mixer.attention or mixer.bidirectional:
            return _over_all_keys(mixer, size)
    return mixer_costs(Path("the mixer"), mixer, size)


def _over_all_keys(mixer: MixerNumbers, hidden_size: int) -> LayerCosts:
    kind = mixer.attention or mixer.kind
    alike = msgspec.structs.replace(mixer, kind=kind, short_convolution=0, bidirectional=False)
    match mixer_costs(Path("the mixer"), alike, hidden_size):
        case KernelAttention() as causal:
            return KernelOverAllKeys(causal)
        case RelativeAttention() as causal:
            return RelativeOverAllKeys(causal, mixer.projection_bias)
        case SoftmaxAttention() as causal if causal.reach is None:
            return SoftmaxOverAllKeys(causal)
    raise ConfigError(f"attention {kind!r} over all keys has no formulas with these options")


def mixer_costs(path: Path, mixer: MixerNumbers, hidden_size: int) -> MixerCosts:
    """The costs of one layer's mixer.

    Raises: ConfigError, which names the file, for heads that do not divide, and for a kind without a formula here.
    """
    match mixer.kind, mixer.feature:
        case ("rfa" | "rfa_gate") as kind, ("gaussian" | "arc_cosine") as feature:
            return _kernel(path, kind, mixer, hidden_size, feature, mixer.num_random, mixer.weighting == "norm")
        case "elu", _:
            return _kernel(path, "elu", mixer, hidden_size, "elu_plus_one", 0)
        case "performer", _:
            return _kernel(path, "performer", mixer, hidden_size, "positive", mixer.num_random, key_weights=True)
        case "efficient", _:
            return _kernel(path, "efficient", mixer, hidden_size, "softmax", 0, key_weights=True)
        case "static_kernel", ("elu" | "gaussian" | "arc_cosine") as named if not mixer.bidirectional:
            heads = _heads(path, mixer, hidden_size)
            if named == "elu":
                return KernelAttention("static_kernel", hidden_size, heads, 0, "elu_plus_one", 0)
            return KernelAttention("static_kernel", hidden_size, heads, mixer.num_random, named, 0)
        case "softmax", _:
            near = mixer.relative or _RelativeConfig()
            return SoftmaxAttention(
                hidden_size,
                _heads(path, mixer, hidden_size),
                mixer.short_convolution,
                mixer.projection_bias,
                reach=None if mixer.relative is None else near.reach,
                relative_values=near.values,
                relative_shared=near.shared,
                value_rank=mixer.value_rank,
            )
        case "scaleformer", _:
            return RelativeAttention(hidden_size, _heads(path, mixer, hidden_size), mixer.reach, mixer.value_rank)
        case "convolution", _ if not mixer.centred:
            return CausalConvolution(hidden_size, mixer.taps)
        case "s4d", _ if mixer.form == "scan":
            return DiagonalStateSpace(hidden_size, (mixer.state_size or 64) // 2)
        case "s4", _ if mixer.form == "scan":
            return DenseStateSpace("s4", hidden_size, mixer.state_size or 64)
        case "hippo", _:
            return LegsMemory(hidden_size, mixer.state_size or 32)
        case "lssl", _:
            learned = mixer.transition == "learned"
            return DenseStateSpace("lssl", hidden_size, mixer.state_size or 64, mixer.outputs, learned)
    raise ConfigError(
        f"{path} has a mixer {mixer.kind!r} with feature {mixer.feature!r}; mixers with a state have formulas: "
        "rfa and rfa_gate (gaussian, arc_cosine), elu, performer, efficient, softmax, scaleformer, convolution, "
        "lssl, hippo, s4 and s4d as a scan"
    )


def _kernel(
    path: Path,
    kind: Literal["rfa", "rfa_gate", "elu", "performer", "efficient"],
    mixer: MixerNumbers,
    hidden_size: int,
    feature: Literal["gaussian", "arc_cosine", "elu_plus_one", "positive", "softmax"],
    num_random: int,
    key_weights: bool = False,
) -> KernelAttention:
    return KernelAttention(
        kind,
        hidden_size,
        _heads(path, mixer, hidden_size),
        num_random,
        feature,
        mixer.short_convolution,
        projection_bias=mixer.projection_bias,
        rotary=mixer.rotary is not None,
        shared_gate=mixer.shared_gate,
        key_weights=key_weights,
        value_rank=mixer.value_rank,
        gated=mixer.gated,
    )


def _heads(path: Path, mixer: MixerNumbers, hidden_size: int) -> int:
    if not mixer.num_heads or hidden_size % mixer.num_heads:
        raise ConfigError(
            f"{path}: hidden_size {hidden_size} is not a multiple of num_heads {mixer.num_heads}; it must be"
        )
    return mixer.num_heads
