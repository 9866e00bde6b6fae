"""Small GGUF files with random weights, written by the package that defines the format."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

__all__ = ["GGUF_TYPES", "TEMPLATE", "write_gguf"]

CHARACTERS = list(bytes_to_unicode().values())
MERGES = ["t h", "th e", "Ġ w", "a s"]
TOKENS = [*CHARACTERS, *(merge.replace(" ", "") for merge in MERGES), "<|begin|>", "<|end|>", "<|turn|>", "<think>"]
TEMPLATE = "{% for m in messages %}<|begin|>{{ m['content'] }}<|turn|>{% endfor %}"
WIDE = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
GGUF_TYPES: dict[str, dict[str, Any]] = {
    "llama": WIDE | {"num_hidden_layers": 2},
    "qwen3": WIDE | {"num_hidden_layers": 2, "head_dim": 128},  # the only width of heads that transformers reads
    "gemma3_text": WIDE | {"num_hidden_layers": 6, "sliding_window": 16},
    "lfm2": WIDE
    | {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3, "block_auto_adjust_ff_dim": False},
}
ARCHITECTURES = {"gemma3_text": "gemma3"}


def write_gguf(
    path: Path,
    kind: str,
    stored: str = "Q8_0",
    more: dict[str, Any] | None = None,
    divisors: np.ndarray | None = None,
) -> Path:
    """Write a model of a type of transformers; matrices whose rows fit are `stored` in blocks, and what else in F32."""
    sizes = GGUF_TYPES[kind] | {"vocab_size": len(TOKENS), "tie_word_embeddings": kind != "qwen3"}
    config, architecture = CONFIG_MAPPING[kind](**sizes), ARCHITECTURES.get(kind, kind)
    writer = gguf.GGUFWriter(path, architecture)
    _write_keys(writer, config, kind, base=10_000.0 if divisors is None else 500_000.0)
    for key, value in (more or {}).items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    torch.manual_seed(len(kind))
    weights = AutoModelForCausalLM.from_config(config).state_dict()
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], config.num_hidden_layers)
    for name, weight in weights.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        shift = float(kind == "gemma3_text" and "norm" in name)  # GGUF has what transformers adds when it runs
        numbers = np.ascontiguousarray((weight + shift + 0.05 * torch.randn_like(weight)).numpy().squeeze())
        quantised = stored if numbers.ndim == 2 and numbers.shape[1] % 32 == 0 else "F32"
        where = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert where is not None, name
        form = gguf.GGMLQuantizationType[quantised]
        writer.add_tensor(where, gguf.quantize(numbers, form), raw_dtype=form)
    if divisors is not None:  # of the frequencies of rotary positions
        writer.add_tensor("rope_freqs.weight", divisors.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_keys(writer: gguf.GGUFWriter, config: Any, kind: str, base: float) -> None:
    writer.add_context_length(256)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    layers = getattr(config, "layer_types", None) if kind == "lfm2" else None
    kv_heads = config.num_key_value_heads
    writer.add_head_count_kv([kv_heads * (layer == "full_attention") for layer in layers] if layers else kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(base)
    writer.add_rope_dimension_count(WIDE["head_dim"])
    if kind != "lfm2":
        writer.add_key_length(config.head_dim)
    else:
        writer.add_shortconv_l_cache(config.conv_L_cache)
    if kind == "gemma3_text":
        writer.add_sliding_window(config.sliding_window)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([1] * (len(TOKENS) - 4) + [3, 3, 3, 4])
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(TOKENS.index("<|begin|>"))
    writer.add_eos_token_id(TOKENS.index("<|end|>"))
    writer.add_eot_token_id(TOKENS.index("<|turn|>"))
    writer.add_add_bos_token(True)
    writer.add_chat_template(TEMPLATE)
