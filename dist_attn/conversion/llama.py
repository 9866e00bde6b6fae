"""Llama: rotary positions, RMS norms, gated MLPs; grouped key and value heads are written out for every query head.

Reference: Touvron et al. 2023; Ainslie et al. 2023 (grouped heads).
"""

from typing import Any

import torch

from dist_attn.conversion.source import ACTIVATIONS, SourceConfig, SourceWeights
from dist_attn.errors import ModelFolderError

__all__ = ["llama_config", "llama_weights"]


def llama_config(source: SourceConfig) -> dict[str, Any]:
    """What our config.json says for this model, as exact softmax attention.

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
            "rotary": source.rotary(head_size, base_key="rope_theta"),
        },
    }


def llama_weights(source: SourceConfig, weights: SourceWeights) -> dict[str, torch.Tensor]:
    """The tensors under our names; q, k and v lie in one matrix, and so do the gate and the input of the MLP."""
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


def _for_every_head(rows: torch.Tensor, groups: int, copies: int) -> torch.Tensor:
    """[G K, ...] -> [G copies K, ...]: the rows of each group again for each of its query heads."""
    rows_GKD: torch.Tensor = rows.unflatten(0, (groups, -1))
    return rows_GKD.repeat_interleave(copies, dim=0).flatten(0, 1)
