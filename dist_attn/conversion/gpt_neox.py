"""GPT-NeoX and Pythia: partly rotary positions, LayerNorm, MLP beside the attention, read-out of its own.

Reference: Black et al. 2022; Biderman et al. 2023.
"""

from typing import Any

import torch

from dist_attn.conversion.source import ACTIVATIONS, SourceConfig, SourceWeights

__all__ = ["gpt_neox_config", "gpt_neox_weights"]


def gpt_neox_config(source: SourceConfig) -> dict[str, Any]:
    """What our config.json says for this model, as exact softmax attention.

    Raises: ModelFolderError for an option that would compute something else.
    """
    size, heads = source.integer("hidden_size", 6144), source.integer("num_attention_heads", 64)
    activation = source.one_of("hidden_act", "gelu", *ACTIVATIONS)
    parallel = source.one_of("use_parallel_residual", True, False)
    rotary = source.rotary(max(1, size // heads), base_key="rotary_emb_base", share_key="rotary_pct", share=0.25)
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
    """The tensors under our names; GPT-NeoX writes q, k and v of one head after those of another."""
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
