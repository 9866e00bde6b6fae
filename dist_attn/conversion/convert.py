"""From a Hugging Face language model or sentence encoder to a folder of ours, exact or with kernel attention."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import ValidationError
from torch import nn

from dist_attn.checkpoints import save_model
from dist_attn.conversion.bert import bert_config, bert_weights, read_sentence_encoder, transformer_folder
from dist_attn.conversion.source import SourceConfig, SourceWeights, read_source_config, read_source_weights
from dist_attn.errors import InputError, ModelFolderError
from dist_attn.model_config.registry import Registry
from dist_attn.models import LanguageModelConfig, TextEncoderConfig, build_model
from dist_attn.shipped import OFFERED_CONVERSIONS, convertible_words
from dist_attn.text import ForeignTokeniser, WordPieceTokeniser, read_foreign

__all__ = ["CONVERSIONS", "Conversion", "convert_folder", "register_conversion"]

ReadConfig = Callable[[SourceConfig], dict[str, Any]]
ReadWeights = Callable[[SourceConfig, SourceWeights], dict[str, torch.Tensor]]

CONVERSIONS: Registry[tuple[ReadConfig, ReadWeights]] = Registry(OFFERED_CONVERSIONS, "conversion")


def register_conversion(model_type: str, read_config: ReadConfig, read_weights: ReadWeights) -> None:
    """Make known how folders of a `model_type` become ours: its config.json in our keys, its tensors by our names.

    An installed package offers one by an entry point of the group `dist_attn.conversions`, named after the type.

    Raises: ConfigError for a type that has one already.
    """
    CONVERSIONS.register([model_type], (read_config, read_weights), read_config.__module__)


register_conversion("bert", bert_config, bert_weights)

# Parts of kernel attention that softmax does not have: sigma begins at 1, and the random vectors are drawn by the seed.
FRESH = (".sigma_H1K", ".w_HDK")


@dataclass(frozen=True)
class Conversion:
    """The kind of a conversion: `softmax` computes the same; `rfa` has its weights with random feature attention.

    Encoders may have `elu` (elu + 1) as well. Kernel attention needs training to be of use; `seed` decides the
    `num_random` random vectors per head of `rfa`. `exact_layers`, counted from 0, keep softmax beside it.
    """

    to: Literal["softmax", "rfa", "elu"] = "softmax"
    num_random: int = 64
    seed: int = 0
    exact_layers: tuple[int, ...] = ()


def convert_folder(folder: Path, out: Path, conversion: Conversion | None = None) -> dict[str, Any]:
    """Write the model in `folder` as a model folder of ours to `out`; returns what was done, as plain values.

    Reads config.json, safetensors and tokenizer.json, and of sentence encoders what says how they pool. Weights are
    written in float32.

    Raises: ModelFolderError for files that are missing or of another kind and for options that are not supported, each
        naming what is; InputError where `out` holds something, and for exact layers that the model does not have.
    """
    conversion = Conversion() if conversion is None else conversion
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out} exists; give a folder that does not, or an empty one")
    inner = transformer_folder(folder)
    source = read_source_config(inner)
    architecture = source.values.get("model_type")
    if architecture not in CONVERSIONS.names():
        raise ModelFolderError(f"{source.path}: model_type is {architecture!r}; supported are {convertible_words()}")
    read_config, read_weights = CONVERSIONS.find(architecture)
    values, tokeniser = read_config(source), read_foreign(inner, streams=True)
    if architecture == "bert":
        values |= {"kind": "text_encoder", **read_sentence_encoder(folder, source), **_frame(inner, tokeniser)}
    else:
        tokeniser = _with_end(inner, tokeniser, source.values.get("eos_token_id"))
    config = _config(source, values, conversion)
    tokeniser = tokeniser.padded(config.vocab_size)
    weights = read_source_weights(inner)
    own = read_weights(source, weights)
    weights.require_empty()
    model = build_model(config).eval()
    _fill(model, own, folder)
    about = {"architecture": architecture, "folder": folder.resolve().name, "to": conversion.to}
    facts = {"converted_from": about if conversion.to == "softmax" else about | {"seed": conversion.seed}}
    save_model(model, out, tokeniser=tokeniser, facts=facts)
    return {**about, "parameters": sum(p.numel() for p in model.parameters()), "out": str(out)}


def _with_end(folder: Path, tokeniser: ForeignTokeniser, end: object) -> ForeignTokeniser:
    """Take the end token of config.json where the tokeniser's own files name none."""
    if isinstance(tokeniser, WordPieceTokeniser):
        raise ModelFolderError(f"{folder}: WordPiece cannot give a text's bytes back, which a language model needs")
    return tokeniser.ending_with(end) if tokeniser.end_token is None and isinstance(end, int) else tokeniser


def _frame(folder: Path, tokeniser: ForeignTokeniser) -> dict[str, Any]:
    if not isinstance(tokeniser, WordPieceTokeniser):
        raise ModelFolderError(f"{folder}: supported for a sentence encoder is WordPiece, as BERT has it")
    prefix, suffix = tokeniser.frame()
    return {"prefix": prefix, "suffix": suffix}


def _config(
    source: SourceConfig, values: dict[str, Any], conversion: Conversion
) -> LanguageModelConfig | TextEncoderConfig:
    random = {"num_random": conversion.num_random, "seed": conversion.seed} if conversion.to == "rfa" else {}
    try:
        if values.get("kind") == "text_encoder":
            encoder = values["encoder"]
            mixer = _stack(encoder, {"attention": conversion.to} | random, conversion)
            return TextEncoderConfig.model_validate(values | {"encoder": encoder | {"mixer": mixer}})
        if conversion.to == "elu":
            raise ModelFolderError(f"{source.path}: elu is for encoders; supported here are softmax and rfa")
        mixer = _stack(values, {"kind": conversion.to} | random, conversion)
        return LanguageModelConfig.model_validate(values | {"mixer": mixer})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ModelFolderError(f"{source.path} does not make a model: {where}: {first['msg']}") from None


def _stack(values: dict[str, Any], changes: dict[str, Any], conversion: Conversion) -> dict[str, Any]:
    """Make the mixer of all layers, or a list of those that change and those that stay exact."""
    exact: dict[str, Any] = values["mixer"]
    if not conversion.exact_layers:
        return exact | changes
    layers = range(values["num_layers"])
    if conversion.to == "softmax" or not set(conversion.exact_layers) <= set(layers):
        raise InputError(
            f"the layers {', '.join(map(str, conversion.exact_layers))} were to stay exact beside {conversion.to}; "
            f"needed are layers from 0 to {len(layers) - 1} and a conversion to kernel attention"
        )
    return {
        "kind": "hybrid",
        "pattern": [exact if layer in conversion.exact_layers else exact | changes for layer in layers],
    }


def _fill(model: nn.Module, own: dict[str, torch.Tensor], folder: Path) -> None:
    """Raises: ModelFolderError for a tensor of another shape than the configuration says."""
    state = model.state_dict()
    for name, tensor in state.items():
        if name in own and own[name].shape != tensor.shape:
            raise ModelFolderError(
                f"{folder}: what becomes {name!r} has shape {tuple(own[name].shape)}, config.json needs "
                f"{tuple(tensor.shape)}"
            )
    missing = [name for name in state if name not in own and not name.endswith(FRESH)]
    if missing or own.keys() - state.keys():
        raise ModelFolderError(f"{folder}: nothing becomes {json.dumps(missing)}; the folder is of another model")
    model.load_state_dict(state | own)
