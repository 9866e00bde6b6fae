"""The average of several checkpoints or model folders of one model, as a model folder."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dist_attn.checkpoints import load_weights, save_model
from dist_attn.errors import ConfigError, InputError
from dist_attn.model_config.folder import read_any_config
from dist_attn.models import Model, ModelConfig, build_model
from dist_attn.shipped.folder_files import read_json_object
from dist_attn.text import Tokeniser, load_tokeniser
from dist_attn.training.checkpointing import load_checkpoint_weights
from dist_attn.training.config import TrainingConfig

__all__ = ["average_folders", "average_models"]

# Facts of a manifest that the weights do not hold: names of classes, and how pixels are scaled.
FACTS_KEPT = ("labels", "pixel_mean", "pixel_deviation")


def average_models(models: Sequence[Model]) -> Model:
    """Average models: every parameter of the result is the mean of theirs, taken in float64; buffers must be equal.

    Raises: InputError for no model, models of different configurations, or buffers that differ.
    Reference: Vaswani et al. 2017, Sec. 6.1: the last 5 or 20 checkpoints; Random Feature Attention: the last 10.
    """
    if not models:
        raise InputError("there is nothing to average; give at least one model")
    first = models[0]
    if any(model.config != first.config for model in models):
        raise InputError("these models have different configurations; only checkpoints of one model can be averaged")
    averaged = build_model(first.config)
    weights = [model.state_dict() for model in models]
    learned = {name for name, _ in first.named_parameters()}
    mean = {}
    for name, tensor in weights[0].items():
        if name in learned:
            mean[name] = torch.stack([w[name].double() for w in weights]).mean(0).to(tensor.dtype)
            continue
        # Random vectors that differ are of other features, whose mean belongs to neither.
        if any(not torch.equal(w[name], tensor) for w in weights):
            raise InputError(f"the models differ in {name}, which is not learned; they are not of one run")
        mean[name] = tensor
    averaged.load_state_dict(mean)
    return averaged.eval()


def average_folders(folders: Sequence[Path], out: Path) -> dict[str, Any]:
    """Average checkpoints of a run (`checkpoints/step-…`) or model folders into the model folder `out`.

    Configuration, tokenisers, and names of classes are those of the first; a checkpoint has them from its run, and
    names of classes from the model folder that the run leaves at its end.

    Raises: ConfigError for an `out` that exists or a folder that is neither; ModelFolderError for damaged weights;
        InputError as `average_models`.
    """
    if out.exists():
        raise ConfigError(f"{out} is there already; give --out a folder that is not")
    origins = [_read(folder) for folder in folders]
    models = []
    for folder, origin in zip(folders, origins, strict=True):
        models.append(build_model(origin.config))
        if (folder / "progress.json").is_file():
            load_checkpoint_weights(models[-1], folder)
        else:
            load_weights(models[-1], folder / "model.safetensors")
    averaged, first = average_models(models), origins[0]
    facts = {"average_of": [folder.name for folder in folders]}
    save_model(
        averaged,
        out,
        tokeniser=first.tokeniser,
        source_tokeniser=first.source_tokeniser,
        half=True,
        facts={**first.facts, **facts},
    )
    return {**facts, "model": str(out)}


@dataclass(frozen=True)
class _Origin:
    """The facts that a model folder, or the run of a checkpoint, holds about the model."""

    config: ModelConfig
    tokeniser: Tokeniser | None = None
    source_tokeniser: Tokeniser | None = None
    facts: dict[str, Any] = field(default_factory=dict)


def _read(folder: Path) -> _Origin:
    if (folder / "config.json").is_file():
        return _read_model_folder(folder)
    run = folder.resolve().parent.parent
    try:
        config = TrainingConfig.model_validate(json.loads((run / "config.json").read_bytes()))
    except (OSError, ValueError, RecursionError):
        raise ConfigError(
            f"{folder} is neither a model folder nor a checkpoint in the folder of its run: it has no config.json, "
            f"and {run / 'config.json'} is not that of a run"
        ) from None
    if config.model.kind == "folder":
        raise ConfigError(f"{folder} is a checkpoint of a model of transformers; only those of own models are averaged")
    if (run / "model" / "config.json").is_file():
        return _read_model_folder(run / "model")
    tokeniser, source = (None if place is None else load_tokeniser(place) for place in config.data.tokenisers())
    return _Origin(config.model, tokeniser, source)


def _read_model_folder(folder: Path) -> _Origin:
    manifest = folder / "manifest.json"
    facts = read_json_object(manifest) if manifest.is_file() else {}
    places = [place if (place / "tokenizer.json").is_file() else None for place in (folder, folder / "source")]
    tokeniser, source = (None if place is None else load_tokeniser(place) for place in places)
    kept = {name: facts[name] for name in FACTS_KEPT if name in facts}
    return _Origin(read_any_config(folder), tokeniser, source, kept)
