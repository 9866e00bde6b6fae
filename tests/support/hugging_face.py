"""Tiny random folders of every shape that `convert` takes, written by transformers itself."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.tokenisers import LLAMA_PATTERN, foreign_contents

VOCABULARY = 352

SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64},
    "gpt2 with another MLP": {"n_embd": 24, "n_head": 3, "n_layer": 1, "n_inner": 40, "activation_function": "relu"},
    "llama": {"num_key_value_heads": 2, "rms_norm_eps": 1e-4},
    "llama tied, with biases": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "gpt_neox": {"layer_norm_eps": 1e-3},
    "gpt_neox in sequence": {"use_parallel_residual": False, "attention_bias": False, "hidden_act": "gelu_new"},
}
SIZES = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 48}


def write_foreign_folder(folder: Path, shape: str = "gpt2", *, shards: bool = False) -> Any:
    """The model that was written, every parameter of it random and large enough to matter; beside it its tokeniser."""
    transformers = pytest.importorskip("transformers", reason="the folders are written by transformers")
    kind = shape.split()[0]
    values = SHAPES[shape] if kind == "gpt2" else SIZES | SHAPES[shape]
    config = transformers.AutoConfig.for_model(kind, vocab_size=VOCABULARY, **values)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder, **({"max_shard_size": "40KB"} if shards else {}))
    (folder / "tokenizer.json").write_text(foreign_contents(LLAMA_PATTERN if kind == "llama" else None))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    return model


def change_config(folder: Path, **changes: Any) -> None:
    """Other values in the folder's config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
