"""Language modelling with a model of transformers, read from its folder and written as one."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from dist_attn.adapters.model import AdaptedModel, load_adapted_model
from dist_attn.text import Tokeniser, load_tokeniser
from dist_attn.training.config import FolderConfig, TrainingConfig
from dist_attn.training.language_task import LanguageTask


def read_model(config: FolderConfig) -> AdaptedModel:
    """Load the model of a folder, to be trained.

    Raises: as `load_adapted_model`.
    """
    model = load_adapted_model(config.folder)
    base = model._modules.pop("_base")  # part of `inner`: a weight has one name in checkpoints
    object.__setattr__(model, "_base", base)
    return model


class FolderTask(LanguageTask):
    """A task of the mean cross entropy of the next token for a downloaded model."""

    model: AdaptedModel  # type: ignore[assignment]

    def _tokeniser_of(self, config: TrainingConfig) -> Tokeniser:
        self._folder = cast(FolderConfig, config.model).folder
        return load_tokeniser(self._data.tokeniser)

    def export(self, folder: Path, weights: Mapping[str, Tensor], facts: dict[str, Any]) -> None:
        temporary = folder.with_name(f".{folder.name}.writing")
        shutil.rmtree(temporary, ignore_errors=True)
        own = {name.removeprefix("inner."): tensor for name, tensor in weights.items()}
        self.model.inner.save_pretrained(temporary, state_dict=own)
        for file in self._folder.iterdir():
            if file.is_file() and "safetensors" not in file.name and not (temporary / file.name).exists():
                shutil.copy(file, temporary)
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)
