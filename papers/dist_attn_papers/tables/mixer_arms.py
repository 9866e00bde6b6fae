"""The mixers that are compared: language models of equal size over those with a state, encoders over the others."""

from collections.abc import Mapping
from typing import Any

from dist_attn.costs import layer_costs

__all__ = ["CAUSAL", "ENCODERS", "HYBRID", "LAYERS_ALONE", "equal_mlp", "layer_config", "mixer_values"]

# Other options are as they are by default. States of 16 numbers where every step multiplies by a full matrix.
CAUSAL: Mapping[str, Mapping[str, Any]] = {
    "softmax": {"kind": "softmax"},
    "rfa": {"kind": "rfa"},
    "rfa_gate": {"kind": "rfa_gate"},
    "elu": {"kind": "elu"},
    "performer": {"kind": "performer"},
    "efficient": {"kind": "efficient"},
    "static_kernel": {"kind": "static_kernel"},
    "scaleformer": {"kind": "scaleformer"},
    "convolution": {"kind": "convolution"},
    "s4d": {"kind": "s4d"},
    "s4": {"kind": "s4", "state_size": 16},
    "lssl": {"kind": "lssl", "state_size": 16},
    "hippo": {"kind": "hippo", "state_size": 16},
    "gla": {"kind": "gla"},
    "lightning": {"kind": "lightning"},
    "mamba2": {"kind": "mamba2", "key_size": 16},
    "gated_delta": {"kind": "gated_delta"},
    "kda": {"kind": "kda"},
    "mlstm": {"kind": "mlstm"},
    "mamba": {"kind": "mamba"},
    "rg_lru": {"kind": "rg_lru"},
    "rwkv7": {"kind": "rwkv7", "decay_rank": 16, "rate_rank": 16, "gate_rank": 16},
}
HYBRID = "hybrid"
ENCODERS: Mapping[str, Mapping[str, Any]] = {
    "softmax": {"kind": "bidirectional", "attention": "softmax"},
    "rfa": {"kind": "bidirectional", "attention": "rfa"},
    "elu": {"kind": "bidirectional", "attention": "elu"},
    "performer": {"kind": "bidirectional", "attention": "performer"},
    "efficient": {"kind": "bidirectional", "attention": "efficient"},
    "static_kernel": {"kind": "static_kernel", "bidirectional": True},
    "scaleformer": {"kind": "bidirectional", "attention": "scaleformer"},
    "convolution-centred": {"kind": "convolution", "centred": True},
    "s4d-convolution": {"kind": "s4d", "form": "convolution", "bidirectional": True},
    "s4-convolution": {"kind": "s4", "form": "convolution", "bidirectional": True, "state_size": 16},
    "sgconv": {"kind": "sgconv", "bidirectional": True},
    "fnet": {"kind": "fnet", "norm": "ortho"},
}
LAYERS_ALONE: Mapping[str, Mapping[str, Any]] = {
    **CAUSAL,
    "fnet": ENCODERS["fnet"],
    "sgconv": {"kind": "sgconv"},
    "s4d-convolution": {"kind": "s4d", "form": "convolution"},
    "mlp_mixer": {"kind": "mlp_mixer", "token_mlp_size": 64},
}
_HEADLESS = ("convolution", "s4d", "s4", "lssl", "hippo", "mamba", "fnet", "sgconv", "mlp_mixer")


def layer_config(options: Mapping[str, Any], width: int, heads: int, length: int) -> dict[str, Any]:
    """The values of a mixer of this width, with heads and a fixed length where its kind has them."""
    values = {"hidden_size": width, **options}
    if values["kind"] not in _HEADLESS:
        values["num_heads"] = heads
    if values["kind"] in ("sgconv", "mlp_mixer"):
        values["length"] = length
    return values


def mixer_values(arm: str, width: int, heads: int, seed: int, layers: int = 3) -> dict[str, Any]:
    """The section [model.mixer] of a language model; random features are drawn by the seed.

    The hybrid's last one of `layers` is softmax.
    """
    if arm == HYBRID:
        kinds = (*("rfa_gate",) * (layers - 1), "softmax")
        return {"kind": "hybrid", "pattern": [mixer_values(kind, width, heads, seed) for kind in kinds]}
    values = layer_config(CAUSAL[arm], width, heads, 0)
    return {**values, "seed": 1000 * seed} if arm.startswith("rfa") else values


def equal_mlp(values: Mapping[str, Any], softmax: Mapping[str, Any], width: int, mlp_size: int) -> int:
    """The size of the MLP with which a layer of `values` has as many parameters as `softmax` with one of `mlp_size`."""
    return mlp_size + round((_parameters(softmax) - _parameters(values)) / (2 * width + 1))


def _parameters(values: Mapping[str, Any]) -> float:
    if values["kind"] == "hybrid":
        each = [_parameters(entry) for entry in values["pattern"]]
        return sum(each) / len(each)
    return layer_costs(values).parameters
