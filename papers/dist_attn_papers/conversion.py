"""Language models of other programs as ours: their config.json in our keys, and their tensors under our names.

GPT-2 has learned positions, LayerNorm, biases everywhere and a read-out tied to the embedding; GPT-NeoX (Pythia) partly
rotary positions, LayerNorm, the MLP beside the attention and a read-out of its own; Llama rotary positions, RMS norms,
gated MLPs, and grouped key and value heads, which are written out for every query head.

Reference: Radford et al. 2019 (GPT-2); Black et al. 2022, Biderman et al. 2023 (GPT-NeoX, Pythia); Touvron et al. 2023,
Ainslie et al. 2023 (Llama, grouped heads).
"""

from typing import Any

import torch

from dist_attn.conversion.convert import register_conversion
from dist_attn.conversion.source import ACTIVATIONS, SourceConfig, SourceWeights
from dist_attn.errors import ModelFolderError
from dist_attn.mixers import RotaryConfig


def gpt2_config(source: SourceConfig) -> dict[str, Any]:
    """Make our config.json of a GPT-2, as exact softmax attention.

    Raises: ModelFolderError for an option that would compute something else.
    """
    size, heads = source.integer("n_embd", 768), source.integer("n_head", 12)
    activation = source.one_of("activation_function", "gelu_new", *ACTIVATIONS)
    source.one_of("scale_attn_weights", True)
    source.one_of("scale_attn_by_inverse_layer_idx", False)
    source.one_of("add_cross_attention", False)
    source.one_of("tie_word_embeddings", True)
    return {
        "vocab_size": source.integer("vocab_size", 50257),
        "hidden_size": size,
        "num_layers": source.integer("n_layer", 12),
        "mlp_size": source.integer("n_inner", 4 * size),
        # Texts longer than the model knew begin again: a served model meets them, and must not fail on them.
        "positions": {"kind": "learned", "length": source.integer("n_positions", 1024), "beyond": "repeat"},
        "block": {
            "norm": {"kind": "layer", "eps": source.real("layer_norm_epsilon", 1e-5)},
            "mlp": {"kind": "plain", "activation": ACTIVATIONS[activation], "bias": True},
        },
        "mixer": {
            "kind": "softmax",
            "hidden_size": size,
            "num_heads": heads,
            "short_convolution": 0,
            "projection_bias": True,
        },
    }


def gpt2_weights(source: SourceConfig, weights: SourceWeights) -> dict[str, torch.Tensor]:
    """Rename the tensors to our names; GPT-2 writes its matrices [in, out]."""
    root = "transformer." if "transformer.wte.weight" in weights else ""
    weights.drop(".attn.bias", ".attn.masked_bias")
    own = {
        "embedding.weight": weights.take(f"{root}wte.weight"),
        "position_embedding.weight": weights.take(f"{root}wpe.weight"),
    }
    if "lm_head.weight" in weights:
        weights.take("lm_head.weight")  # the embedding once more
    pairs = {"mixer.qkv": "attn.c_attn", "mixer.out": "attn.c_proj", "mlp_in": "mlp.c_fc", "mlp_out": "mlp.c_proj"}
    for layer in range(source.integer("n_layer", 12)):
        ours, theirs = f"blocks.{layer}", f"{root}h.{layer}"
        for kind in ("weight", "bias"):
            own[f"{ours}.mixer_norm.{kind}"] = weights.take(f"{theirs}.ln_1.{kind}")
            own[f"{ours}.mlp_norm.{kind}"] = weights.take(f"{theirs}.ln_2.{kind}")
            for name, their_name in pairs.items():
                tensor = weights.take(f"{theirs}.{their_name}.{kind}")
                own[f"{ours}.{name}.{kind}"] = tensor.T.contiguous() if kind == "weight" else tensor
    for kind in ("weight", "bias"):
        own[f"norm.{kind}"] = weights.take(f"{root}ln_f.{kind}")
    return own


def gpt_neox_config(source: SourceConfig) -> dict[str, Any]:
    """Make our config.json of a GPT-NeoX, as exact softmax attention.

    Raises: ModelFolderError for an option that would compute something else.
    """
    size, heads = source.integer("hidden_size", 6144), source.integer("num_attention_heads", 64)
    activation = source.one_of("hidden_act", "gelu", *ACTIVATIONS)
    parallel = source.one_of("use_parallel_residual", True, False)
    rotary = _rotary(source, max(1, size // heads), base_key="rotary_emb_base", share_key="rotary_pct", share=0.25)
    return {
        "vocab_size": source.integer("vocab_size", 50432),
        "hidden_size": size,
        "num_layers": source.integer("num_hidden_layers", 44),
        "mlp_size": source.integer("intermediate_size", 24576),
        "block": {
            "norm": {"kind": "layer", "eps": source.real("layer_norm_eps", 1e-5)},
            "mlp": {"kind": "plain", "activation": ACTIVATIONS[activation], "bias": True},
            "residual": "parallel" if parallel else "sequential",
        },
        "readout": "tied" if source.one_of("tie_word_embeddings", False, True) else "own",
        "mixer": {
            "kind": "softmax",
            "hidden_size": size,
            "num_heads": heads,
            "short_convolution": 0,
            "projection_bias": source.one_of("attention_bias", True, False),
            "rotary": rotary,
        },
    }


def gpt_neox_weights(source: SourceConfig, weights: SourceWeights) -> dict[str, torch.Tensor]:
    """Rename the tensors to our names; GPT-NeoX writes q, k and v of one head after those of another."""
    heads = source.integer("num_attention_heads", 64)
    weights.drop(".attention.bias", ".attention.masked_bias", "rotary_emb.inv_freq")
    own = {"embedding.weight": weights.take("gpt_neox.embed_in.weight")}
    if not source.one_of("tie_word_embeddings", False, True):
        own["unembedding.weight"] = weights.take("embed_out.weight")
    elif "embed_out.weight" in weights:
        weights.take("embed_out.weight")  # the embedding once more
    for kind in ("weight", "bias"):
        own[f"norm.{kind}"] = weights.take(f"gpt_neox.final_layer_norm.{kind}")
        for layer in range(source.integer("num_hidden_layers", 44)):
            ours, theirs = f"blocks.{layer}", f"gpt_neox.layers.{layer}"
            own[f"{ours}.mixer_norm.{kind}"] = weights.take(f"{theirs}.input_layernorm.{kind}")
            own[f"{ours}.mlp_norm.{kind}"] = weights.take(f"{theirs}.post_attention_layernorm.{kind}")
            own[f"{ours}.mlp_in.{kind}"] = weights.take(f"{theirs}.mlp.dense_h_to_4h.{kind}")
            own[f"{ours}.mlp_out.{kind}"] = weights.take(f"{theirs}.mlp.dense_4h_to_h.{kind}")
            if kind == "weight" or source.one_of("attention_bias", True, False):
                rows = weights.take(f"{theirs}.attention.query_key_value.{kind}")
                own[f"{ours}.mixer.qkv.{kind}"] = rows.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2)
                own[f"{ours}.mixer.out.{kind}"] = weights.take(f"{theirs}.attention.dense.{kind}")
    return own


def llama_config(source: SourceConfig) -> dict[str, Any]:
    """Make our config.json of a Llama, as exact softmax attention.

    Raises: ModelFolderError for an option that would compute something else.
    """
    size, heads = source.integer("hidden_size", 4096), source.integer("num_attention_heads", 32)
    groups, head_size = source.integer("num_key_value_heads", heads), source.integer("head_dim", max(1, size // heads))
    if heads % groups or head_size * heads != size:
        raise ModelFolderError(
            f"{source.path}: {heads} heads of {head_size} in {groups} groups for hidden_size {size}; supported are "
            "heads that fill it, in groups that divide them"
        )
    activation = source.one_of("hidden_act", "silu", *ACTIVATIONS)
    mlp_bias = source.one_of("mlp_bias", False, True)
    return {
        "vocab_size": source.integer("vocab_size", 32000),
        "hidden_size": size,
        "num_layers": source.integer("num_hidden_layers", 32),
        "mlp_size": source.integer("intermediate_size", 11008),
        "block": {
            "norm": {"kind": "rms", "eps": source.real("rms_norm_eps", 1e-6)},
            "mlp": {"kind": "gated", "activation": ACTIVATIONS[activation], "bias": mlp_bias},
        },
        "readout": "tied" if source.one_of("tie_word_embeddings", False, True) else "own",
        "mixer": {
            "kind": "softmax",
            "hidden_size": size,
            "num_heads": heads,
            "short_convolution": 0,
            "projection_bias": source.one_of("attention_bias", False, True),
            "rotary": _rotary(source, head_size, base_key="rope_theta"),
        },
    }


def llama_weights(source: SourceConfig, weights: SourceWeights) -> dict[str, torch.Tensor]:
    """Rename the tensors to our names; q, k and v lie in one matrix, and so do the gate and the input of the MLP."""
    heads = source.integer("num_attention_heads", 32)
    copies = heads // source.integer("num_key_value_heads", heads)
    weights.drop("rotary_emb.inv_freq")
    own = {
        "embedding.weight": weights.take("model.embed_tokens.weight"),
        "norm.weight": weights.take("model.norm.weight"),
    }
    if not source.one_of("tie_word_embeddings", False, True):
        own["unembedding.weight"] = weights.take("lm_head.weight")
    elif "lm_head.weight" in weights:
        weights.take("lm_head.weight")  # the embedding once more
    for layer in range(source.integer("num_hidden_layers", 32)):
        ours, theirs = f"blocks.{layer}", f"model.layers.{layer}"
        own[f"{ours}.mixer_norm.weight"] = weights.take(f"{theirs}.input_layernorm.weight")
        own[f"{ours}.mlp_norm.weight"] = weights.take(f"{theirs}.post_attention_layernorm.weight")
        for kind in ("weight", "bias"):
            if kind == "weight" or source.one_of("attention_bias", False, True):
                q, k, v = (weights.take(f"{theirs}.self_attn.{name}_proj.{kind}") for name in "qkv")
                k, v = (_for_every_head(t, heads // copies, copies) for t in (k, v))
                own[f"{ours}.mixer.qkv.{kind}"] = torch.cat([q, k, v])
                own[f"{ours}.mixer.out.{kind}"] = weights.take(f"{theirs}.self_attn.o_proj.{kind}")
            if kind == "weight" or source.one_of("mlp_bias", False, True):
                gate, up = (weights.take(f"{theirs}.mlp.{name}_proj.{kind}") for name in ("gate", "up"))
                own[f"{ours}.mlp_in.{kind}"] = torch.cat([gate, up])
                own[f"{ours}.mlp_out.{kind}"] = weights.take(f"{theirs}.mlp.down_proj.{kind}")
    return own


def _rotary(
    source: SourceConfig, head_size: int, *, base_key: str, share_key: str | None = None, share: float = 1.0
) -> RotaryConfig:
    """Read plain rotary positions, from the keys of newer files (`rope_parameters`) or older ones.

    Raises: ModelFolderError for positions that are scaled, or that turn an odd number of dimensions.
    """
    source.one_of("sliding_window", None)
    scaling = source.values.get("rope_scaling") or {}
    newer = source.values.get("rope_parameters") or {}
    for rope in (scaling, newer):
        kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else rope
        if kind != "default":
            raise ModelFolderError(
                f"{source.path}: rotary positions are scaled ({kind!r}); supported are plain ones, rope_scaling null"
            )
    at = SourceConfig(source.path, {**source.values, **newer})
    base = at.real("rope_theta" if "rope_theta" in at.values else base_key, 10_000.0)
    if share_key is not None:
        share = at.real("partial_rotary_factor" if "partial_rotary_factor" in newer else share_key, share)
    size = int(head_size * share)
    if size < 2 or size % 2 or size > head_size:
        raise ModelFolderError(
            f"{source.path}: rotary positions turn {size} of {head_size} numbers per head; needed is an even number "
            "of them"
        )
    return RotaryConfig(size=size, base=base)


def _for_every_head(rows: torch.Tensor, groups: int, copies: int) -> torch.Tensor:
    """Repeat the rows of each group for each of its query heads: [G K, ...] -> [G copies K, ...]."""
    rows_GKD: torch.Tensor = rows.unflatten(0, (groups, -1))
    return rows_GKD.repeat_interleave(copies, dim=0).flatten(0, 1)


register_conversion("gpt2", gpt2_config, gpt2_weights)
register_conversion("gpt_neox", gpt_neox_config, gpt_neox_weights)
register_conversion("llama", llama_config, llama_weights)
