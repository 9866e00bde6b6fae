"""BERT as an encoder: learned positions, token types, a norm behind every sublayer, biases everywhere.

Reference: Devlin et al. 2019.
"""

from typing import Any

import torch

from dist_attn.conversion.source import ACTIVATIONS, SourceConfig, SourceWeights

__all__ = ["bert_config", "bert_weights"]

# Heads for other tasks, and what is computed from the configuration.
NOT_OF_THE_ENCODER = (
    "pooler.dense.weight",
    "pooler.dense.bias",
    "embeddings.position_ids",
    "cls.predictions.bias",
    "cls.predictions.decoder.weight",
    "cls.predictions.decoder.bias",
    "cls.predictions.transform.dense.weight",
    "cls.predictions.transform.dense.bias",
    "cls.predictions.transform.LayerNorm.weight",
    "cls.predictions.transform.LayerNorm.bias",
    "cls.seq_relationship.weight",
    "cls.seq_relationship.bias",
)


def bert_config(source: SourceConfig) -> dict[str, Any]:
    """What our config.json says for this model, as exact softmax attention; how it pools is not in this file.

    Raises: ModelFolderError for an option that would compute something else.
    """
    size, heads = source.integer("hidden_size", 768), source.integer("num_attention_heads", 12)
    activation = source.one_of("hidden_act", "gelu", *ACTIVATIONS)
    source.one_of("position_embedding_type", "absolute", None)
    source.one_of("is_decoder", False)
    source.one_of("add_cross_attention", False)
    return {
        "vocab_size": source.integer("vocab_size", 30522),
        "token_types": source.integer("type_vocab_size", 2),
        "encoder": {
            "hidden_size": size,
            "num_layers": source.integer("num_hidden_layers", 12),
            "mlp_size": source.integer("intermediate_size", 3072),
            "positions": "learned",
            "max_length": source.integer("max_position_embeddings", 512),
            "embedding_norm": True,
            "block": {
                "norm": {"kind": "layer", "eps": source.real("layer_norm_eps", 1e-12)},
                "norm_placement": "post",
                "mlp": {"kind": "plain", "activation": ACTIVATIONS[activation], "bias": True},
            },
            "mixer": {
                "kind": "bidirectional",
                "attention": "softmax",
                "hidden_size": size,
                "num_heads": heads,
                "projection_bias": True,
            },
        },
    }


def bert_weights(source: SourceConfig, weights: SourceWeights) -> dict[str, torch.Tensor]:
    """The tensors under our names; q, k and v lie in one matrix."""
    weights.drop(*NOT_OF_THE_ENCODER)
    root = "bert." if "bert.embeddings.word_embeddings.weight" in weights else ""
    own = {
        "embedding.weight": weights.take(f"{root}embeddings.word_embeddings.weight"),
        "type_embedding.weight": weights.take(f"{root}embeddings.token_type_embeddings.weight"),
        "encoder.position_embedding.weight": weights.take(f"{root}embeddings.position_embeddings.weight"),
    }
    names = {
        "mixer.out": "attention.output.dense",
        "mixer_norm": "attention.output.LayerNorm",
        "mlp_in": "intermediate.dense",
        "mlp_out": "output.dense",
        "mlp_norm": "output.LayerNorm",
    }
    for kind in ("weight", "bias"):
        own[f"encoder.embedding_norm.{kind}"] = weights.take(f"{root}embeddings.LayerNorm.{kind}")
        for layer in range(source.integer("num_hidden_layers", 12)):
            ours, theirs = f"encoder.blocks.{layer}", f"{root}encoder.layer.{layer}"
            parts = [weights.take(f"{theirs}.attention.self.{name}.{kind}") for name in ("query", "key", "value")]
            own[f"{ours}.mixer.qkv.{kind}"] = torch.cat(parts)
            for name, their_name in names.items():
                own[f"{ours}.{name}.{kind}"] = weights.take(f"{theirs}.{their_name}.{kind}")
    return own
