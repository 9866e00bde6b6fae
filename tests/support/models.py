"""Small random models, in memory and as folders, for tests that need one and do not care what it says."""

from pathlib import Path
from typing import Any

import torch

from dist_attn.checkpoints import save_model
from dist_attn.model_config.mixer import mixer_config_class
from dist_attn.models import LanguageModel, LanguageModelConfig, build_model
from dist_attn.text import ByteTokeniser

SIZE = 16


def small_config(kind: str = "rfa_gate", **changes: Any) -> LanguageModelConfig:
    """Two layers over the given mixer, bytes as tokens; "hybrid" is one of kernel and one of exact attention."""
    mixer = {"kind": kind, "pattern": [_mixer("rfa_gate"), _mixer("softmax")]} if kind == "hybrid" else _mixer(kind)
    values = {"vocab_size": ByteTokeniser().vocab_size, "hidden_size": SIZE, "num_layers": 2, "mlp_size": 32}
    return LanguageModelConfig.model_validate({**values, "mixer": mixer, **changes})


def _mixer(kind: str) -> dict[str, Any]:
    mixer: dict[str, Any] = {"kind": kind, "hidden_size": SIZE, "num_heads": 2}
    if "num_random" in mixer_config_class(kind).model_fields:
        mixer["num_random"] = 8
    return mixer


def small_model(config: LanguageModelConfig | None = None, *, seed: int = 0) -> LanguageModel:
    """A model whose every parameter is random and large enough to matter, in evaluation mode."""
    model = build_model(small_config() if config is None else config)
    generator = torch.Generator().manual_seed(seed)  # not the global one: simulated ranks are threads
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def write_small_folder(folder: Path, *, seed: int = 0, kind: str = "rfa_gate") -> Path:
    """A whole model folder with a byte tokeniser."""
    save_model(small_model(small_config(kind), seed=seed), folder, tokeniser=ByteTokeniser())
    return folder
