"""A causal language model that begins with the weights of a bidirectional sentence encoder.

Embeddings, norms, feed-forward layers and the projections of attention are the teacher's. Gated linear attention whose
features estimate the teacher's softmax, behind a short convolution that starts as the identity, takes the place of
attention over all tokens: the state has one size, and no token sees a later one.
"""

from typing import cast

import torch
from torch import Tensor, nn

from dist_attn.errors import ConfigError
from dist_attn.mixers.heads import ProjectedAttention
from dist_attn.models import LanguageModel, LanguageModelConfig, TextEncoder, build_model
from dist_attn.models.blocks import Block

__all__ = ["begin_student"]

NUM_RANDOM = 64
# Positive features need no floor to stay stable. Over the first 45 steps, beside the default of 0.3, the distance of
# windows to the teacher is 0.39 for 0.48.
DENOMINATOR = {"kind": "floor", "eps": 1e-3}
# Of the logits of gates, over the heads: they begin with memories of 55 to 8,000 tokens.
GATE_BIASES = (4.0, 9.0)


def begin_student(teacher: TextEncoder) -> LanguageModel:
    """The student, in float32.

    Positions are left out: their mean over the teacher's `max_tokens` goes into each token's embedding, and with it the
    norm of embeddings, which reads one token.

    Raises: ConfigError for a teacher whose blocks have their norms before attention.
    """
    encoder = teacher.config.encoder
    if encoder.block.norm_placement != "post" or teacher.encoder.embedding_norm is None:
        raise ConfigError("the teacher's blocks have no norms behind them; needed is an encoder as BERT is")
    attention = encoder.mixer.model_dump()
    mixer = {"hidden_size": encoder.hidden_size, "num_heads": attention["num_heads"], "projection_bias": True}
    config = LanguageModelConfig.model_validate(
        {
            "vocab_size": teacher.config.vocab_size,
            "hidden_size": encoder.hidden_size,
            "num_layers": encoder.num_layers,
            "mlp_size": encoder.mlp_size,
            "mixer": {
                "kind": "performer",
                "gated": True,
                "denominator": DENOMINATOR,
                "num_random": NUM_RANDOM,
                **mixer,
            },
            "block": encoder.block.model_dump(),
        }
    )
    student = build_model(config)
    with torch.no_grad():
        student.embedding.weight.copy_(_embeddings(teacher))
        blocks = cast(list[Block], list(teacher.encoder.blocks))
        for own, block in zip(cast(list[Block], list(student.blocks)), blocks, strict=True):
            for name in ("mixer_norm", "mlp_norm", "mlp_in", "mlp_out"):
                getattr(own, name).load_state_dict(getattr(block, name).state_dict())
            mixer_own, attention_own = cast(ProjectedAttention, own.mixer), cast(ProjectedAttention, block.mixer)
            mixer_own.qkv.load_state_dict(attention_own.qkv.state_dict())
            mixer_own.out.load_state_dict(attention_own.out.state_dict())
            gate = cast(nn.Linear, own.mixer.gate)
            gate.bias.copy_(torch.linspace(*GATE_BIASES, len(gate.bias)))
        _keep_scale(student.norm, blocks[-1].mlp_norm)
    return student


def _embeddings(teacher: TextEncoder) -> Tensor:
    table = teacher.embedding.weight.clone()
    if teacher.type_embedding is not None:
        table += teacher.type_embedding.weight[0]
    positions = teacher.encoder.position_embedding
    if positions is not None:
        table += positions.weight[: teacher.config.max_tokens].mean(0)
    normed: Tensor = cast(nn.LayerNorm, teacher.encoder.embedding_norm)(table)
    return normed


def _keep_scale(norm: nn.Module, last: nn.Module) -> None:
    """The final norm, which the teacher lacks, gives back what the last block's norm makes of an average token."""
    norm, last = cast(nn.LayerNorm, norm), cast(nn.LayerNorm, last)
    mean = last.bias.mean()
    norm.weight.fill_((last.weight.square() + (last.bias - mean).square()).mean().sqrt().item())
    norm.bias.fill_(mean.item())
