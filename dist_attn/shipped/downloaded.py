"""Folders of transformers as they were downloaded: the supported ones, and the facts in their files; no torch.

What needs the model itself, names and shapes of its tensors, is asked of transformers: `dist_attn/adapters/check.py`.
"""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from dist_attn.errors import ModelFolderError
from dist_attn.shipped.folder_files import read_json_object
from dist_attn.shipped.generation_config import GenerationDefaults, read_generation_defaults
from dist_attn.shipped.stored_tensors import StoredTensor, read_stored_tensors

__all__ = ["SUPPORTED", "DownloadedModel", "LoadedSizes", "check_supported", "read_downloaded"]

Accepted = dict[str, tuple[Any, ...]]
"""Options, each with the values that are bound; the default, which config.json need not name, is one of them."""

COMMON: Final[Accepted] = {
    "quantization_config": (None,),
    "compression_config": (None,),
    "is_encoder_decoder": (None, False),
    "add_cross_attention": (None, False),
    "use_bidirectional_attention": (None, False),
    "is_causal": (True,),  # null is False to transformers
    "attention_chunk_size": (None,),
}
QWEN: Final[Accepted] = {"attn_output_gate": (True,)}
GEMMA: Final[Accepted] = {"attn_logit_softcapping": (None,)}
SUPPORTED: Final[dict[str, Accepted]] = {
    "qwen3_next": {"use_sliding_window": (False,)},
    "qwen3_5": QWEN,
    "qwen3_5_text": QWEN,
    "qwen3_5_moe": QWEN,
    "qwen3_5_moe_text": QWEN,
    "kimi_linear": {"moe_router_activation_func": ("sigmoid",), "moe_layer_freq": (1,), "mla_use_nope": (True,)},
    "mamba2": {"rms_norm": (True,)},
    "nemotron_h": {"sliding_window": (None,)},
    "minimax": {"postnorm": (True,), "shared_intermediate_size": (None, 0)},
    "falcon_h1": {"mamba_use_mlp": (True,), "attn_layer_indices": (None,)},
    "bamba": {},
    "granitemoehybrid": {},
    "olmo_hybrid": {"linear_use_gate": (True,)},
    "bailing_hybrid": {"score_function": ("sigmoid",)},
    "zamba2": {},
    "recurrent_gemma": {},
    "mamba": {},
    "falcon_mamba": {},
    "jamba": {"mamba_inner_layernorms": (True,), "sliding_window": (None,)},
    "xlstm": {"inference_state_dtype": ("float32",), "weight_mode": ("single",), "add_out_norm": (True,)},
    "lfm2": {"block_use_swiglu": (True,), "use_pos_enc": (True,)},
    "llama": {},
    "qwen3": {},
    "gemma3": GEMMA,
    "gemma3_text": GEMMA,
    "mistral": {},
    "gemma2": {},
    "gpt_neox": {},
}
"""The values of `model_type` that are served as they were downloaded, each with options of its own.

Most options need no word here, as transformers' modules honour them: `tests/adapters/test_options.py` tries them. Here
are those that modules, or our operations, compute as if they had one value.
"""

ROPES: Final = ("default", "linear", "yarn", "llama3", "proportional")
"""Rotary positions whose angles depend on nothing but the position."""
ROPES_BY_LENGTH: Final = ("dynamic", "longrope")
"""Rotary positions whose angles change for all tokens once a sequence is long, so that a cache would be wrong."""

LAYER_TYPES: Final = (
    "full_attention", "sliding_attention", "linear_attention", "attention", "mamba", "recurrent", "conv", "hybrid",
    "moe", "mlp", "sparse", "dense",
)  # fmt: skip
COUNTS: Final = (
    "num_hidden_layers", "num_blocks", "num_attention_heads", "num_key_value_heads", "num_heads", "head_dim",
    "sliding_window", "attention_window_size",
)  # fmt: skip
EXPERTS: Final = ("num_experts", "num_local_experts", "n_routed_experts")
EXPERTS_OF_A_TOKEN: Final = ("num_experts_per_tok", "num_experts_per_token")
WRITES: Final = ("CausalLM", "ConditionalGeneration")
DTYPES: Final = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
EMBEDDINGS: Final = ("embed_tokens.weight", "embeddings.weight", "word_embeddings.weight")


@dataclass(frozen=True)
class DownloadedModel:
    """The facts in the files of a folder; `dtype` is that of its weights."""

    folder: Path
    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int | None
    dtype: str
    generation: GenerationDefaults
    tensors: dict[str, StoredTensor] = field(repr=False)

    @property
    def weight_bytes(self) -> int:
        """The bytes of all tensors as they are stored."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


class LoadedSizes(msgspec.Struct, frozen=True):
    """The sizes of a model once it is loaded, its weights in its folder's precision; or in words why it cannot be.

    The state of one sequence, computed in float32, has `state_bytes` before any token, and each adds `token_bytes` at
    most; a layer that looks no further back than a window keeps no more than that.
    """

    parameters: int = 0
    weight_bytes: dict[str, int] = {}  # by the name of the precision
    state_bytes: int = 0
    token_bytes: int = 0
    layer_parameters: tuple[int, ...] = ()  # those of each layer
    refusal: str = ""

    def parameters_of_a_rank(self, ranks: int) -> int:
        """The parameters of a rank where layers are spread: its share of them, one more on its way, and all else."""
        layers = sum(self.layer_parameters)
        return self.parameters - layers + -(-layers // ranks) + max(self.layer_parameters, default=0)

    def state_bytes_at(self, tokens: int) -> int:
        """The most bytes of a state after `tokens` tokens."""
        return self.state_bytes + self.token_bytes * tokens


def read_downloaded(folder: Path) -> DownloadedModel:
    """Read the model of a folder of a supported type, as far as its files can tell.

    Raises: ModelFolderError for a type or an option that is not supported, and for files that are missing, damaged or
        at odds with each other.
    """
    path = folder / "config.json"
    values = read_json_object(path)
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in SUPPORTED:
        raise ModelFolderError(f"{path}: model_type is {kind!r}; supported are {', '.join(SUPPORTED)}")
    text = check_supported(path, kind, values)
    _check_task(path, values.get("architectures"))
    dtype = _dtype(path, text) or _dtype(path, values)
    tensors = read_stored_tensors(folder)
    vocab_size, hidden_size = _sizes(path, text, tensors)
    layers = text.get("num_hidden_layers", text.get("num_blocks"))
    return DownloadedModel(
        folder,
        kind,
        vocab_size,
        hidden_size,
        layers if isinstance(layers, int) else None,
        dtype or _most_common(tensors),
        read_generation_defaults(folder, vocab_size),
        tensors,
    )


def check_supported(path: Path | str, kind: str, values: dict[str, Any]) -> dict[str, Any]:
    """Check the options of a configuration of a supported type; return those of its text part.

    Raises: ModelFolderError for an option that is not supported, by `path` and its name.
    """
    inner = values.get("text_config")
    text = inner if isinstance(inner, dict) else values
    for each in (values,) if text is values else (values, text):
        _check_options(path, COMMON | SUPPORTED[kind], each)
        _check_layers(path, each)
        for rope in (each.get("rope_scaling"), each.get("rope_parameters")):
            _check_rope(path, rope)
        _check_counts(path, kind, each)
    return text


def _check_options(path: Path | str, accepted: Accepted, values: dict[str, Any]) -> None:
    for key, allowed in accepted.items():
        value = values.get(key)
        # True is no 1, and 0 no False: JSON tells them apart.
        if key in values and not any(type(value) is type(each) and value == each for each in allowed):
            said = "set" if isinstance(value, dict | list) else repr(value)
            supported = " or ".join(map(str, allowed))
            raise ModelFolderError(f"{path}: {key} is {said}, which is not supported; supported is {supported}")


def _check_layers(path: Path | str, values: dict[str, Any]) -> None:
    for key in ("layer_types", "layers_block_type", "block_types"):
        layers = values.get(key) or []
        if not isinstance(layers, list):
            raise ModelFolderError(f"{path}: {key} is {layers!r}; needed is a list of types of layers")
        for layer in layers:
            if layer not in LAYER_TYPES:
                raise ModelFolderError(f"{path}: {key} has {layer!r}; supported are {', '.join(LAYER_TYPES)}")


def _check_counts(path: Path | str, kind: str, values: dict[str, Any]) -> None:
    """Refuse counts that transformers takes but then divides by, makes no tensor of, or asks no expert for."""
    for key in COUNTS:
        if isinstance(values.get(key), int):
            _at_least_one(path, key, values[key])
    named = {key: values[key] for key in (*EXPERTS, *EXPERTS_OF_A_TOKEN) if isinstance(values.get(key), int)}
    experts = next((named[key] for key in EXPERTS if named.get(key)), None)  # dense models have 0 of both
    if kind == "jamba" and experts == 1:
        return  # a plain layer, which nothing asks
    asked = next((key for key in EXPERTS_OF_A_TOKEN if key in named), None)
    if experts is not None and asked is not None and not 1 <= named[asked] <= experts:
        raise ModelFolderError(f"{path}: {asked} is {named[asked]}; needed is a number from 1 to its {experts} experts")


def _check_task(path: Path, names: Any) -> None:
    """Refuse models made for something else than writing; they may have the same tensors."""
    for name in names if isinstance(names, list) else ():
        task = str(name).rpartition("For")[2]
        if "For" in str(name) and task not in WRITES:
            raise ModelFolderError(f"{path}: architectures has {name!r}; needed is a model that writes, For{WRITES[0]}")


def _check_rope(path: Path | str, rope: Any) -> None:
    """Check rotary positions as older and newer files name them; newer ones may have an object per type of layer."""
    if not isinstance(rope, dict):
        return
    for each in (rope, *(inner for inner in rope.values() if isinstance(inner, dict))):
        kind = each.get("rope_type", each.get("type", "default"))
        if kind in ROPES_BY_LENGTH:
            raise ModelFolderError(
                f"{path}: rotary positions are {kind!r}, whose angles depend on the length of the whole sequence; "
                f"supported are {', '.join(ROPES)}"
            )
        if kind not in ROPES:
            raise ModelFolderError(f"{path}: rotary positions are {kind!r}; supported are {', '.join(ROPES)}")


def _dtype(path: Path, values: dict[str, Any]) -> str | None:
    for key in ("dtype", "torch_dtype"):
        value = values.get(key)
        if value is not None and (not isinstance(value, str) or value not in DTYPES):
            raise ModelFolderError(f"{path}: {key} is {value!r}; needed is one of {', '.join(DTYPES)}")
        if value is not None:
            return str(value)
    return None


def _most_common(tensors: dict[str, StoredTensor]) -> str:
    count = Counter(tensor.dtype for tensor in tensors.values())
    return max(DTYPES, key=lambda name: count[DTYPES[name]])


def _sizes(path: Path, text: dict[str, Any], tensors: dict[str, StoredTensor]) -> tuple[int, int]:
    """The tokens and the width: of config.json, and where it leaves them to its type's defaults, of the embedding."""
    shapes = [tensor.shape for name, tensor in tensors.items() if name.endswith(EMBEDDINGS) and len(tensor.shape) == 2]
    rows, width = shapes[0] if shapes else (None, None)
    vocab_size, hidden_size = text.get("vocab_size", rows), text.get("hidden_size", text.get("embedding_dim", width))
    return _at_least_one(path, "vocab_size", vocab_size), _at_least_one(path, "hidden_size", hidden_size)


def _at_least_one(path: Path | str, key: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelFolderError(f"{path}: {key} is {value!r}; needed is a whole number of at least 1")
    return value
