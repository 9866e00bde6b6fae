"""Small models of every kind, and folders that hold them."""

import contextlib
import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dist_attn.model_config.mixer import MixerConfig, registered_mixers
from dist_attn.models import LanguageModel, LanguageModelConfig, build_model

__all__ = [
    "MODEL_CASES",
    "built_in_mixers",
    "kinds_of",
    "model_config",
    "needed_options",
    "small_model",
    "streaming_kinds",
    "write_config",
]

# Each says only what it means to differ in, so the defaults of the configuration are part of the case.
MODEL_CASES: dict[str, dict[str, Any]] = {
    "gated": {"mixer": {"kind": "rfa_gate", "num_heads": 4, "num_random": 16}},
    "gated with all defaults": {"mixer": {"kind": "rfa_gate", "num_heads": 2}},
    "plain, no convolution": {"mixer": {"kind": "rfa", "num_heads": 2, "num_random": 8, "short_convolution": 0}},
    "arc-cosine, one tap": {
        "mixer": {"kind": "rfa_gate", "num_heads": 4, "num_random": 8, "short_convolution": 1, "feature": "arc_cosine"}
    },
    "wide MLP, positions": {"mlp_size": 384, "positions": "sinusoidal", "mixer": {"kind": "rfa", "num_heads": 8}},
    "one gate, orthogonal, a pool": {
        "mixer": {"kind": "rfa_gate", "num_heads": 4, "shared_gate": True, "orthogonal": True, "pool": 20}
    },
    "elu": {"mixer": {"kind": "elu", "num_heads": 4}},
    "elu, one gate, rotary, biases": {
        "mixer": {
            "kind": "elu",
            "num_heads": 2,
            "gated": True,
            "shared_gate": True,
            "short_convolution": 0,
            "rotary": {"size": 8},
            "projection_bias": True,
            "value_rank": 24,
        }
    },
    "convolution": {"mixer": {"kind": "convolution", "taps": 6}},
    "gated delta rule": {"mixer": {"kind": "gated_delta", "num_heads": 4}},
    "gated delta rule, shared keys": {
        "mixer": {"kind": "gated_delta", "num_heads": 4, "key_heads": 2, "key_size": 24, "short_convolution": 1}
    },
    "Mamba-2, groups": {
        "mixer": {"kind": "mamba2", "num_heads": 4, "groups": 2, "key_size": 16, "convolution_bias": False}
    },
    "values of full rank": {"mixer": {"kind": "rfa_gate", "num_heads": 2, "num_random": 16, "value_rank": 64}},
    "values of low rank": {
        "mixer": {"kind": "rfa", "num_heads": 4, "num_random": 16, "value_rank": 3, "projection_bias": True}
    },
    "softmax, relative, values of full rank": {
        "mixer": {
            "kind": "softmax",
            "num_heads": 2,
            "value_rank": 64,
            "relative": {"reach": 3},
            "projection_bias": True,
        }
    },
    "key weights": {"mixer": {"kind": "rfa", "num_heads": 4, "num_random": 16, "weighting": "norm"}},
    "softmax": {"mixer": {"kind": "softmax", "num_heads": 4}},
    "softmax, rotary": {"mixer": {"kind": "softmax", "num_heads": 4, "rotary": {"size": 8}, "short_convolution": 0}},
    "softmax, relative keys, shared": {
        "mixer": {"kind": "softmax", "num_heads": 4, "relative": {"reach": 0, "values": False, "shared": True}}
    },
    "hybrid, twice around": {
        "num_layers": 3,
        "mixer": {
            "kind": "hybrid",
            "pattern": [{"kind": "rfa_gate", "num_heads": 4, "num_random": 16}, {"kind": "mamba", "state_size": 12}],
        },
    },
    "hybrid, with exact attention": {
        "mixer": {
            "kind": "hybrid",
            "pattern": [{"kind": "elu", "num_heads": 4}, {"kind": "softmax", "num_heads": 2}],
        },
    },
    "concatenated positions": {"positions": "concatenated", "mixer": {"kind": "rfa", "num_heads": 4, "num_random": 8}},
    "learned positions and biases": {
        "positions": {"kind": "learned", "length": 16, "beyond": "repeat"},
        "mixer": {"kind": "softmax", "num_heads": 2, "short_convolution": 0, "projection_bias": True},
    },
    "rotary, gated, RMS norm, own read-out": {
        "block": {"norm": {"kind": "rms"}, "mlp": {"kind": "gated", "activation": "silu", "bias": False}},
        "readout": "own",
        "mixer": {"kind": "rfa_gate", "num_heads": 4, "num_random": 8, "rotary": {"size": 16}},
    },
    "half rotary, parallel residual, biases": {
        "block": {"residual": "parallel", "mlp": {"activation": "gelu"}},
        "mixer": {"kind": "rfa", "num_heads": 2, "num_random": 8, "rotary": {"size": 16}, "projection_bias": True},
    },
}


def needed_options(kind: str, heads: int) -> dict[str, int]:
    """The heads of a kind that must be told how many."""
    field = registered_mixers()[kind].model_fields.get("num_heads")
    return {} if field is None or not field.is_required() else {"num_heads": heads}


def built_in_mixers() -> dict[str, type[MixerConfig]]:
    """The kinds of this project itself, whatever else is installed and was loaded."""
    return {kind: one for kind, one in registered_mixers().items() if one.__module__.startswith("dist_attn.")}


def streaming_kinds() -> list[str]:
    """Every built-in kind that a language model can go on from as it is by default."""
    streams = []
    for kind in built_in_mixers():
        values = {"kind": kind, "hidden_size": 4, **needed_options(kind, 1)}
        with contextlib.suppress(ValidationError):  # of kinds that need more, which take a sequence whole
            streams += [kind] if MixerConfig.model_validate(values).streams else []
    return streams


def kinds_of(case: str) -> set[str]:
    """The kinds of mixers of its layers."""
    mixer = MODEL_CASES[case]["mixer"]
    return {one["kind"] for one in mixer.get("pattern", [mixer])}


# A kind that nothing is said of above is a case as it is by default.
MODEL_CASES |= {
    kind: {"mixer": {"kind": kind, **needed_options(kind, 4)}}
    for kind in streaming_kinds()
    if kind not in {one for case in MODEL_CASES for one in kinds_of(case)}
}


def model_config(case: str) -> dict[str, Any]:
    """What config.json of this case says."""
    own = MODEL_CASES[case]
    size = 64
    return {
        "kind": "language_model",
        "vocab_size": 96,
        "hidden_size": size,
        "num_layers": 2,
        "mlp_size": 128,
        **own,
        "mixer": _with_size(own["mixer"], size),
    }


def small_model(case: str) -> LanguageModel:
    """The model of this case, with fresh parameters."""
    return build_model(LanguageModelConfig.model_validate(model_config(case))).eval()


def write_config(case: str, folder: Path) -> Path:
    """A folder with the config.json of this case and nothing else."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model_config(case)))
    return folder


def _with_size(mixer: dict[str, Any], size: int) -> dict[str, Any]:
    if "pattern" in mixer:
        return {**mixer, "pattern": [_with_size(one, size) for one in mixer["pattern"]]}
    return {"hidden_size": size, **mixer}
