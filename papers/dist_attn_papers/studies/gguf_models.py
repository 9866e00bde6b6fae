"""Models of transformers written as GGUF files, the form in which llama.cpp reads the very same weights.

Names of tensors and keys are llama.cpp's. What it stores in another way than transformers: decays as -exp(A_log), norms
around 1, queries, keys, values and gates of a delta rule by kind and not by key head.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from dist_attn.wire.choices import WeightPrecision

__all__ = ["write_gguf"]

Tensors = Iterator[tuple[str, torch.Tensor]]

# Of GGUF; 8-bit ones have a scale for every 32 numbers.
KINDS: Mapping[WeightPrecision, str] = {"float32": "F32", "bfloat16": "BF16", "int8": "Q8_0"}
# Which tensors are held in fewer bits, as llama.cpp's own conversion does: those that products read.
ROUNDED = ("token_embd", "output", "_in", "_out", "_q", "_k", "_v", "_qkv", "attn_output", "attn_gate", "ssm_ba")


def write_gguf(model: Any, path: Path, weights: WeightPrecision) -> None:
    """Write a `Mamba2ForCausalLM` or `Qwen3NextForCausalLM`, with token ids as its vocabulary's words."""
    from gguf import GGMLQuantizationType, GGUFWriter
    from gguf.quants import quantize

    architecture, values, tensors_of = _ARCHITECTURES[model.config.model_type]
    config, rounded = model.config, GGMLQuantizationType[KINDS[weights]]
    writer = GGUFWriter(path, architecture)
    for name, value in values(config).items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(f"{architecture}.{name}", value)
    _add_vocabulary(writer, config.vocab_size)
    for name, tensor in tensors_of(config, model.state_dict()):
        array = tensor.detach().float().contiguous().numpy()
        if weights != "float32" and _is_rounded(name):
            writer.add_tensor(name, quantize(array, rounded), raw_dtype=rounded)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _is_rounded(name: str) -> bool:
    part = name.removesuffix(".weight").rpartition(".")[2]
    return (
        name.endswith(".weight")
        and (part.endswith(ROUNDED) or part.endswith(("_exps", "_shexp")))
        and ("gate_inp" not in part)
    )


def _add_vocabulary(writer: Any, size: int) -> None:
    """Words nobody reads, as prompts and answers are ids; llama.cpp insists on a line break and a merge."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(["\u010a", *(f"<{token}>" for token in range(1, size))])
    writer.add_token_types([1] * size)
    writer.add_token_merges(["< 1"])
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)


def _mamba2_values(config: Any) -> dict[str, float]:
    return {
        "context_length": 1 << 20,
        "embedding_length": config.hidden_size,
        "feed_forward_length": 0,
        "attention.head_count": 0,
        "block_count": config.num_hidden_layers,
        "ssm.conv_kernel": config.conv_kernel,
        "ssm.inner_size": config.expand * config.hidden_size,
        "ssm.state_size": config.state_size,
        "ssm.time_step_rank": config.num_heads,
        "ssm.group_count": config.n_groups,
        "attention.layer_norm_rms_epsilon": float(config.layer_norm_epsilon),
        "vocab_size": config.vocab_size,
    }


def _mamba2_tensors(config: Any, stored: Mapping[str, torch.Tensor]) -> Tensors:
    yield "token_embd.weight", stored["backbone.embeddings.weight"]
    yield "output_norm.weight", stored["backbone.norm_f.weight"]
    yield "output.weight", stored["lm_head.weight"]
    for number in range(config.num_hidden_layers):
        block, layer = f"blk.{number}", f"backbone.layers.{number}"
        mixer = f"{layer}.mixer"
        yield f"{block}.attn_norm.weight", stored[f"{layer}.norm.weight"]
        yield f"{block}.ssm_in.weight", stored[f"{mixer}.in_proj.weight"]
        yield f"{block}.ssm_conv1d.weight", stored[f"{mixer}.conv1d.weight"][:, 0]
        yield f"{block}.ssm_conv1d.bias", stored[f"{mixer}.conv1d.bias"]
        yield f"{block}.ssm_dt.bias", stored[f"{mixer}.dt_bias"]
        yield f"{block}.ssm_a", -stored[f"{mixer}.A_log"].exp()[:, None]
        yield f"{block}.ssm_d", stored[f"{mixer}.D"][:, None]
        yield f"{block}.ssm_norm.weight", stored[f"{mixer}.norm.weight"].reshape(config.n_groups, -1)
        yield f"{block}.ssm_out.weight", stored[f"{mixer}.out_proj.weight"]


def _qwen3_next_values(config: Any) -> dict[str, float]:
    rope = config.rope_parameters
    return {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "block_count": config.num_hidden_layers,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(rope["rope_theta"]),
        "rope.dimension_count": int(config.head_dim * rope["partial_rotary_factor"]),
        "expert_count": config.num_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_feed_forward_length": config.shared_expert_intermediate_size,
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": config.linear_value_head_dim * config.linear_num_value_heads,
        "full_attention_interval": config.layer_types.index("full_attention") + 1,
        "vocab_size": config.vocab_size,
    }


def _qwen3_next_tensors(config: Any, stored: Mapping[str, torch.Tensor]) -> Tensors:
    yield "token_embd.weight", stored["model.embed_tokens.weight"]
    yield "output_norm.weight", 1.0 + stored["model.norm.weight"]
    yield "output.weight", stored["lm_head.weight"]
    for number, kind in enumerate(config.layer_types):
        block, layer = f"blk.{number}", f"model.layers.{number}"
        own = {name.removeprefix(f"{layer}."): t for name, t in stored.items() if name.startswith(f"{layer}.")}
        mixer = _delta_tensors(config, own) if kind == "linear_attention" else _attention_tensors(own)
        for name, tensor in (*mixer, *_expert_tensors(own)):
            yield f"{block}.{name}", tensor


def _delta_tensors(config: Any, own: Mapping[str, torch.Tensor]) -> Tensors:
    keys, values = config.linear_key_head_dim, config.linear_value_head_dim
    heads, width = config.linear_num_key_heads, config.hidden_size
    each = values * config.linear_num_value_heads // heads
    by_head_GXD = own["linear_attn.in_proj_qkvz.weight"].reshape(heads, -1, width)
    q, k, v, gate = (t.reshape(-1, width) for t in by_head_GXD.split([keys, keys, each, each], dim=1))
    yield "attn_qkv.weight", torch.cat([q, k, v])
    yield "attn_gate.weight", gate
    yield "ssm_ba.weight", own["linear_attn.in_proj_ba.weight"]
    yield "ssm_conv1d.weight", own["linear_attn.conv1d.weight"][:, 0]
    yield "ssm_dt.bias", own["linear_attn.dt_bias"]
    yield "ssm_a", -own["linear_attn.A_log"].exp()
    yield "ssm_norm.weight", own["linear_attn.norm.weight"]
    yield "ssm_out.weight", own["linear_attn.out_proj.weight"]


def _attention_tensors(own: Mapping[str, torch.Tensor]) -> Tensors:
    for name, theirs in (("q", "q"), ("k", "k"), ("v", "v"), ("output", "o")):
        yield f"attn_{name}.weight", own[f"self_attn.{theirs}_proj.weight"]
    for name in ("q", "k"):
        yield f"attn_{name}_norm.weight", 1.0 + own[f"self_attn.{name}_norm.weight"]


def _expert_tensors(own: Mapping[str, torch.Tensor]) -> Tensors:
    yield "attn_norm.weight", 1.0 + own["input_layernorm.weight"]
    yield "post_attention_norm.weight", 1.0 + own["post_attention_layernorm.weight"]
    gate, up = own["mlp.experts.gate_up_proj"].chunk(2, dim=1)
    yield "ffn_gate_inp.weight", own["mlp.gate.weight"]
    yield "ffn_gate_exps.weight", gate
    yield "ffn_up_exps.weight", up
    yield "ffn_down_exps.weight", own["mlp.experts.down_proj"]
    yield "ffn_gate_inp_shexp.weight", own["mlp.shared_expert_gate.weight"][0]
    for name in ("gate", "up", "down"):
        yield f"ffn_{name}_shexp.weight", own[f"mlp.shared_expert.{name}_proj.weight"]


_ARCHITECTURES: dict[
    str, tuple[str, Callable[[Any], dict[str, float]], Callable[[Any, Mapping[str, torch.Tensor]], Tensors]]
] = {
    "mamba2": ("mamba2", _mamba2_values, _mamba2_tensors),
    "qwen3_next": ("qwen3next", _qwen3_next_values, _qwen3_next_tensors),
}
