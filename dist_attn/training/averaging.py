"""The average of several checkpoints or model folders of one model, as a model folder."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dist_attn.checkpoints import load_weights, read_config, save_model
from dist_attn.errors import ConfigError, InputError
from dist_attn.models import LanguageModel, LanguageModelConfig, build_model
from dist_attn.text import Tokeniser, load_tokeniser
from dist_attn.training.config import TrainingConfig

__all__ = ["average_folders", "average_models"]


def average_models(models: Sequence[LanguageModel]) -> LanguageModel:
    """A model whose every parameter is the mean of the models' ones, taken in float64; buffers must be equal.

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
        # Random vectors that differ are of other features, whose mean is nobody's.
        if any(not torch.equal(w[name], tensor) for w in weights):
            raise InputError(f"the models differ in {name}, which is not learned; they are not of one run")
        mean[name] = tensor
    averaged.load_state_dict(mean)
    return averaged.eval()


def average_folders(folders: Sequence[Path], out: Path) -> dict[str, Any]:
    """Average checkpoints of a run (`checkpoints/step-…`) or model folders into the model folder `out`.

    The configuration and the tokeniser are those of the first.

    Raises: ConfigError for an `out` that exists or a folder that is neither; ModelFolderError for damaged weights;
        InputError as `average_models`.
    """
    if out.exists():
        raise ConfigError(f"{out} is there already; give --out a folder that is not")
    found = [_read(folder) for folder in folders]
    models = []
    for folder, (config, _) in zip(folders, found, strict=True):
        models.append(build_model(config))
        load_weights(models[-1], folder / "model.safetensors")
    averaged = average_models(models)
    facts = {"average_of": [folder.name for folder in folders]}
    save_model(averaged, out, tokeniser=found[0][1], half=True, facts=facts)
    return {**facts, "model": str(out)}


def _read(folder: Path) -> tuple[LanguageModelConfig, Tokeniser | None]:
    """What a model folder, or the run that a checkpoint is of, says about the model."""
    if (folder / "config.json").is_file():
        tokeniser = load_tokeniser(folder) if (folder / "tokenizer.json").is_file() else None
        return read_config(folder), tokeniser
    run = folder.resolve().parent.parent / "config.json"
    try:
        config = TrainingConfig.model_validate(json.loads(run.read_bytes()))
    except (OSError, ValueError):
        raise ConfigError(
            f"{folder} is neither a model folder nor a checkpoint in the folder of its run: it has no config.json, "
            f"and {run} is not that of a run"
        ) from None
    return config.model, load_tokeniser(config.data.tokeniser)
