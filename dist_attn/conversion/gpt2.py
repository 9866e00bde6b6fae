"""GPT-2: learned positions, LayerNorm, biases everywhere, read-out tied to the embedding.

Reference: Radford et al. 2019.
"""

from typing import Any

import torch

from dist_attn.conversion.source import ACTIVATIONS, SourceConfig, SourceWeights

__all__ = ["gpt2_config", "gpt2_weights"]


def gpt2_config(source: SourceConfig) -> dict[str, Any]:
    """What our config.json says for this model, as exact softmax attention.

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
    """The tensors under our names; GPT-2 writes its matrices [in, out]."""
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
