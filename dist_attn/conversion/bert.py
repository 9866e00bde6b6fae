"""BERT as an encoder, and the files of sentence-transformers beside its weights: its pooling, and where texts are cut.

BERT has learned positions, token types, a norm behind every sublayer and biases everywhere. The folder's modules.json,
1_Pooling/config.json and sentence_bert_config.json are read.

Reference: Devlin et al. 2019 (BERT); Reimers and Gurevych 2019 (sentence-transformers).
"""

from pathlib import Path
from typing import Any

import torch

from dist_attn.conversion.source import ACTIVATIONS, SourceConfig, SourceWeights
from dist_attn.errors import ModelFolderError
from dist_attn.shipped.folder_files import find_json_object, read_json

# Heads for other tasks, and what is computed from the configuration.
NOT_OF_THE_ENCODER = (
    "pooler.dense.weight",
    "pooler.dense.bias",
    "embeddings.position_ids",
    "cls.predictions.bias",
    "cls.predictions.decoder.weight",
    "cls.predictions.decoder.bias",
    "cls.predictions.transform.dense.weight",
    "cls.predictions.transform.dense.bias",
    "cls.predictions.transform.LayerNorm.weight",
    "cls.predictions.transform.LayerNorm.bias",
    "cls.seq_relationship.weight",
    "cls.seq_relationship.bias",
)


def bert_config(source: SourceConfig) -> dict[str, Any]:
    """Make our config.json of this model, as exact softmax attention; its pooling is not in this file.

    Raises: ModelFolderError for an option that would compute something else.
    """
    size, heads = source.integer("hidden_size", 768), source.integer("num_attention_heads", 12)
    activation = source.one_of("hidden_act", "gelu", *ACTIVATIONS)
    source.one_of("position_embedding_type", "absolute", None)
    source.one_of("is_decoder", False)
    source.one_of("add_cross_attention", False)
    return {
        "vocab_size": source.integer("vocab_size", 30522),
        "token_types": source.integer("type_vocab_size", 2),
        "encoder": {
            "hidden_size": size,
            "num_layers": source.integer("num_hidden_layers", 12),
            "mlp_size": source.integer("intermediate_size", 3072),
            "positions": "learned",
            "max_length": source.integer("max_position_embeddings", 512),
            "embedding_norm": True,
            "block": {
                "norm": {"kind": "layer", "eps": source.real("layer_norm_eps", 1e-12)},
                "norm_placement": "post",
                "mlp": {"kind": "plain", "activation": ACTIVATIONS[activation], "bias": True},
            },
            "mixer": {
                "kind": "bidirectional",
                "attention": "softmax",
                "hidden_size": size,
                "num_heads": heads,
                "projection_bias": True,
            },
        },
    }


def bert_weights(source: SourceConfig, weights: SourceWeights) -> dict[str, torch.Tensor]:
    """Rename the tensors to our names; q, k and v lie in one matrix."""
    weights.drop(*NOT_OF_THE_ENCODER)
    root = "bert." if "bert.embeddings.word_embeddings.weight" in weights else ""
    own = {
        "embedding.weight": weights.take(f"{root}embeddings.word_embeddings.weight"),
        "type_embedding.weight": weights.take(f"{root}embeddings.token_type_embeddings.weight"),
        "encoder.position_embedding.weight": weights.take(f"{root}embeddings.position_embeddings.weight"),
    }
    names = {
        "mixer.out": "attention.output.dense",
        "mixer_norm": "attention.output.LayerNorm",
        "mlp_in": "intermediate.dense",
        "mlp_out": "output.dense",
        "mlp_norm": "output.LayerNorm",
    }
    for kind in ("weight", "bias"):
        own[f"encoder.embedding_norm.{kind}"] = weights.take(f"{root}embeddings.LayerNorm.{kind}")
        for layer in range(source.integer("num_hidden_layers", 12)):
            ours, theirs = f"encoder.blocks.{layer}", f"{root}encoder.layer.{layer}"
            parts = [weights.take(f"{theirs}.attention.self.{name}.{kind}") for name in ("query", "key", "value")]
            own[f"{ours}.mixer.qkv.{kind}"] = torch.cat(parts)
            for name, their_name in names.items():
                own[f"{ours}.{name}.{kind}"] = weights.take(f"{theirs}.{their_name}.{kind}")
    return own


MODULES = "modules.json"
# Newer folders name a pooling, older ones have a switch for each.
POOLINGS = {"mean": "mean", "cls": "first"}
SWITCHES = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}


def transformer_folder(folder: Path) -> Path:
    """Find the folder of the encoder itself: this one, or one in it that modules.json names.

    Raises: ModelFolderError for parts that are not supported.
    """
    return folder / _modules(folder).get("Transformer", "")


def read_sentence_encoder(folder: Path, source: SourceConfig) -> dict[str, Any]:
    """Read `pooling`, `normalise` and `max_tokens` of our config.json.

    A folder without modules.json is read as sentence-transformers reads it: the mean, not normalised.

    Raises: ModelFolderError for a pooling or an option that would compute something else.
    """
    modules = _modules(folder)
    prompts = find_json_object(folder / "config_sentence_transformers.json") or {}
    if prompts.get("default_prompt_name") is not None:
        raise ModelFolderError(
            f"{folder} puts a prompt before every text (default_prompt_name "
            f"{prompts['default_prompt_name']!r}); supported is none: set it to null and send the prompt with the text"
        )
    pooling = "mean"
    if "Pooling" in modules:
        pooling = _pooling(folder / modules["Pooling"] / "config.json")
    about = find_json_object(transformer_folder(folder) / "sentence_bert_config.json") or {}
    if about.get("do_lower_case"):
        raise ModelFolderError(
            f"{folder}: sentence_bert_config.json asks for do_lower_case; supported is null or false, with the "
            "lower case in tokenizer.json's normalizer"
        )
    return {"pooling": pooling, "normalise": "Normalize" in modules, "max_tokens": _max_tokens(folder, source, about)}


def _modules(folder: Path) -> dict[str, str]:
    """Read the folders of the parts by the name of their class."""
    path = folder / MODULES
    if not path.is_file():
        return {}
    try:
        parts = read_json(path)
        named = [(str(part["type"]).rpartition(".")[2], str(part["path"])) for part in parts]
    except (TypeError, KeyError):
        raise ModelFolderError(f"{path} is not a list of modules with a type and a path each") from None
    names = [name for name, _ in named]
    if names not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise ModelFolderError(
            f"{path} lists {', '.join(names) or 'nothing'}; supported are Transformer, Pooling and, last, Normalize"
        )
    if any(Path(place).name != place for _, place in named):
        raise ModelFolderError(f"{path} names a folder that is not directly in {folder}")
    return dict(named)


def _pooling(path: Path) -> str:
    values = find_json_object(path)
    if not values:
        raise ModelFolderError(f"{path} is missing, which says how the model pools")
    mode = values.get("pooling_mode")
    if mode is None:
        on = [key for key, value in values.items() if key.startswith("pooling_mode_") and value is True]
        mode = SWITCHES.get(on[0], on[0]) if len(on) == 1 else on
    mode = mode[0] if isinstance(mode, list | tuple) and len(mode) == 1 else mode
    if not isinstance(mode, str) or mode not in POOLINGS:
        raise ModelFolderError(f"{path}: the pooling is {mode!r}; supported is mean or cls, one of them")
    return POOLINGS[mode]


def _max_tokens(folder: Path, source: SourceConfig, about: dict[str, Any]) -> int:
    """The number of tokens at which texts are cut: max_seq_length, else the tokeniser's; never beyond the positions."""
    positions = source.integer("max_position_embeddings", 512)
    limit = about.get("max_seq_length")
    if limit is None:
        of_tokeniser = find_json_object(transformer_folder(folder) / "tokenizer_config.json") or {}
        limit = of_tokeniser.get("model_max_length", positions)
    if not isinstance(limit, int | float) or isinstance(limit, bool) or limit < 1:
        raise ModelFolderError(f"{folder}: max_seq_length is {limit!r}; needed is a whole number of at least 1")
    return int(min(limit, positions))
