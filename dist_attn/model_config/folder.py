"""The reading of a model folder's config.json."""

import json
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from dist_attn.errors import ModelFolderError

# What is built in is registered before a folder is read.
from dist_attn.model_config import encoders  # noqa: F401
from dist_attn.model_config.language_model import LanguageModelConfig
from dist_attn.model_config.model import MODELS, ModelConfig
from dist_attn.model_config.refusal import refusal
from dist_attn.shipped import refuse_downloaded
from dist_attn.shipped.folder_files import read_file

Config = TypeVar("Config")


def kind_of_model(folder: Path) -> str:
    """Read the `kind` that config.json names; empty where it names none.

    Raises: ModelFolderError when it cannot be read.
    """
    values = _values(read_file(folder / "config.json"))
    return str(values.get("kind", "")) if isinstance(values, dict) else ""


def read_config(folder: Path) -> LanguageModelConfig:
    """Read the configuration in a model folder.

    Raises: ModelFolderError when config.json is not a configuration of a language model of ours.
    """
    kind = kind_of_model(folder)
    if kind != "language_model" and kind in MODELS.names():
        raise ModelFolderError(f"{folder} holds a {kind}; needed here is a language model, which can write")
    return _read(folder, TypeAdapter(LanguageModelConfig))


def read_any_config(folder: Path) -> ModelConfig:
    """Read the configuration of a model of any kind, as `read_config`."""
    return _read(folder, TypeAdapter[ModelConfig](ModelConfig))


def _read(folder: Path, kind: TypeAdapter[Config]) -> Config:
    path = folder / "config.json"
    contents = read_file(path)
    refuse_downloaded(folder)
    try:
        return kind.validate_json(contents)
    except ValidationError as error:
        where, words = refusal(error, _values(contents))
        raise ModelFolderError(f"{path}: {where or 'the whole file'}: {words}") from None


def _values(contents: bytes) -> Any:
    """Parse a JSON file; None where it is not JSON, which the caller then reports."""
    try:
        return json.loads(contents)
    except (ValueError, RecursionError):
        return None
