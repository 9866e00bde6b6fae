"""Models of transformers with random weights, as people download them."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Mamba2Config, PreTrainedModel, Qwen3NextConfig

VOCABULARY = 97


def qwen3_next(vocab_size: int = VOCABULARY) -> PreTrainedModel:
    """Two layers of the gated delta rule and two of softmax attention, with experts."""
    torch.manual_seed(0)
    config = Qwen3NextConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        layer_types=["linear_attention", "full_attention"] * 2,
        bos_token_id=1,
        eos_token_id=2,
    )
    return AutoModelForCausalLM.from_config(config).eval()


def save(model: PreTrainedModel, folder: Path) -> Path:
    """Its folder, without a tokeniser."""
    model.save_pretrained(folder)
    return folder


def llama(hidden_size: int = 32, layers: int = 2, *, vocab_size: int = VOCABULARY, **options: Any) -> PreTrainedModel:
    """Softmax attention alone; of 512 numbers and 8 layers 30 million parameters."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=1,
        eos_token_id=2,
        **options,
    )
    return AutoModelForCausalLM.from_config(config).eval()


def mamba2() -> PreTrainedModel:
    """Layers of Mamba-2 alone."""
    torch.manual_seed(0)
    config = Mamba2Config(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_heads=8, head_dim=8, state_size=8, n_groups=2
    )
    return AutoModelForCausalLM.from_config(config).eval()
