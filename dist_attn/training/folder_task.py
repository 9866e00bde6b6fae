"""Language modelling with a model of transformers, read from its folder and written as one."""

import re
import shutil
import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from dist_attn.adapters.context_parallel import Recomputation
from dist_attn.adapters.model import AdaptedModel, load_adapted_model
from dist_attn.checkpoints import replaced_folder, write_manifest
from dist_attn.errors import ConfigError, MissingExtraError, extra_hint
from dist_attn.shipped import origin
from dist_attn.shipped.downloaded import read_downloaded
from dist_attn.text import Tokeniser, fitted, load_tokeniser
from dist_attn.training.config import FolderConfig, LoraConfig, TrainingConfig
from dist_attn.training.datasets.token_cache import Progress, nothing_shown
from dist_attn.training.language_task import LanguageTask
from dist_attn.training.mesh import Share

FUSED = ("mamba", "mamba2", "falcon_mamba", "falcon_h1", "nemotron_h")
"""Types of which peft refuses adapters beside `out_proj`, whose weights kernels of others take out of their layer."""
TOKENISER_FILES = ("*token*.json", "*.model", "vocab.*", "merges.txt", "chat_template.*")


def read_model(config: FolderConfig) -> AdaptedModel:
    """Load the model of a folder, to be trained.

    Raises: as `load_adapted_model`; ConfigError for a model that draws at random in training, or balances its experts.
    """
    model = load_adapted_model(config.folder)
    for name, value in model.inner.config.get_text_config().to_dict().items():
        if value and ("dropout" in name or "jitter" in name or name == "output_router_logits"):
            raise ConfigError(
                f"{config.folder / 'config.json'}: {name} is {value}, which is not trained here: the loss is the "
                "cross entropy of the next token, and nothing is drawn; take it out, or train by a loop of your own "
                "with dist_attn.context_parallel, which balances experts"
            )
    return model


def add_adapters(model: AdaptedModel, folder: Path, lora: LoraConfig) -> Any:
    """Put adapters into a model, whose own weights are frozen; return peft's model around it.

    Raises: MissingExtraError without peft; ConfigError for targets that peft does not take.
    """
    try:
        import peft
    except ImportError:
        raise MissingExtraError(f"model.lora needs peft: {extra_hint('lora')}") from None
    inner, whole = model.inner, lora.targets == "all-linear"
    options = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=lora.targets if isinstance(lora.targets, str) else list(lora.targets),
        exclude_modules=["out_proj"] if whole and inner.config.model_type in FUSED else None,
        task_type=peft.TaskType.CAUSAL_LM,
    )
    inner.name_or_path = str(folder)  # which peft writes down
    try:
        with warnings.catch_warnings(action="ignore"):
            return peft.get_peft_model(inner, options)
    except ValueError as error:
        raise ConfigError(f"model.lora.targets: {' '.join(str(error).split())}") from None


class FolderTask(LanguageTask):
    """A task of the mean cross entropy of the next token for a downloaded model."""

    model: AdaptedModel  # type: ignore[assignment]
    matrices_by_name = False

    def __init__(self, config: TrainingConfig, share: Share, progress: Progress = nothing_shown) -> None:
        super().__init__(config, share, progress)
        own = cast(FolderConfig, config.model)
        self._adapters = None if own.lora is None else add_adapters(self.model, own.folder, own.lora)
        self._halved = self._adapters is not None and config.run.dtype == self._described.dtype == "bfloat16"
        if self._halved:
            self._halve_frozen()
        if config.run.activation_checkpointing:
            Recomputation(self.model.inner)
            self.model.inner.activation_checkpointing_enable({"use_reentrant": False})

    def _halve_frozen(self) -> None:
        """Keep what autocast rounds in every product in bfloat16, which is the folder's: the same bits."""
        table = self.model.inner.get_input_embeddings().weight
        for module in self.model.inner.modules():
            if isinstance(module, torch.nn.Linear) and not module.weight.requires_grad and module.weight is not table:
                module.weight.data = module.weight.data.bfloat16()

    def validate(self) -> dict[str, float | int]:
        with self._autocast() if self._halved else nullcontext():
            return super().validate()

    def export(self, folder: Path, weights: Mapping[str, Tensor], facts: dict[str, Any]) -> None:
        if self._adapters is not None:
            weights = self._merged(folder.with_name("adapter"), weights)
        stored = getattr(torch, self._described.dtype)
        own = {name.removeprefix("inner."): tensor for name, tensor in weights.items()}
        # Vectors stay in float32, as those of own models do.
        own |= {n: t.to(stored) for n, t in own.items() if t.dim() > 1 and t.is_floating_point()}
        with replaced_folder(folder) as temporary:
            self.model.inner.save_pretrained(temporary, state_dict=own)
            written = temporary / "config.json"
            written.write_text(re.sub(r'("dtype": )"\w+"', rf'\1"{self._described.dtype}"', written.read_text()))
            tokens = [file for pattern in TOKENISER_FILES for file in self._data.tokeniser.glob(pattern)]
            for file in (*tokens, self._described.folder / "generation_config.json"):
                if file.is_file():
                    shutil.copy(file, temporary)
            write_manifest(temporary, self.model, {"trained_on": self._trained_on, **facts})

    def _merged(self, folder: Path, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Write the adapters with these weights as peft does, and return the weights of a model that needs none."""
        assert self._adapters is not None
        self.model.float()  # sums of weights and adapters are rounded once
        with torch.no_grad():
            for name, own in self.model.state_dict().items():
                own.copy_(weights[name])
        with replaced_folder(folder) as temporary:
            self._adapters.save_pretrained(temporary, save_embedding_layers=False)  # "auto" asks a hub
        self._adapters.merge_and_unload()
        self.model.requires_grad_(True)  # all of it is what was learned
        return self.model.state_dict()

    def _tokeniser_of(self, config: TrainingConfig) -> Tokeniser:
        folder, tokeniser = cast(FolderConfig, config.model).folder, self._data.tokeniser
        if origin(folder) == "ours":
            raise ConfigError(f"{folder} is a model folder of this project; train it on with run.begin_from")
        self._described = read_downloaded(folder)
        return fitted(load_tokeniser(tokeniser), tokeniser, self._described.vocab_size)
