"""The making of a stream encoder from a sentence encoder: it reads in blocks, and remembers what stood before them."""

import math
from pathlib import Path
from typing import Any, cast

import torch
from pydantic import ValidationError
from torch import nn

from dist_attn.checkpoints import load_text_encoder, save_model
from dist_attn.errors import ConfigError
from dist_attn.mixers.kernel_attention import CausalKernelAttention
from dist_attn.model_config.refusal import refusal
from dist_attn.models import ContextConfig, StreamEncoder, StreamEncoderConfig, TextEncoder, build_model
from dist_attn.models.blocks import Block
from dist_attn.shipped import resolve_model_folder
from dist_attn.text import load_tokeniser

__all__ = ["begin_stream_encoder", "convert_sentence_encoder", "remember"]

BLOCK = 256
# Measured on chapters of novels and questions about them (decision 0037).
MEMORY_TOKENS, MEMORY_SHARE = 1024, 0.4
HEAD_SIZE, MLP_SIZE = 64, 64


def begin_stream_encoder(teacher: TextEncoder, block: int, context: ContextConfig | None = None) -> StreamEncoder:
    """Make a stream encoder with the teacher's weights, whose `context` adds nothing until it is trained.

    A block may be longer than the teacher reads at once, as far as its positions reach.

    Raises: ConfigError for a block that is too long or does not divide the grid of 512 tokens, a context of another
        width, and a teacher that pools by its first token.
    """
    sentence = teacher.config.model_dump()
    frame = teacher.config.frame_tokens
    sentence["max_tokens"] = max(teacher.config.max_tokens, block + frame)
    values = {"sentence": sentence, "block": block, "context": None if context is None else context.model_dump()}
    try:
        config = StreamEncoderConfig.model_validate(values)
    except ValidationError as error:
        where, words = refusal(error, values)
        raise ConfigError(f"these do not make a stream encoder: {where or 'the whole'}: {words}") from None
    model = build_model(config)
    model.sentence.load_state_dict(teacher.state_dict())
    with torch.no_grad():
        for name, parameter in model.context.named_parameters():
            if name.endswith(("out.weight", "out.bias")):
                parameter.zero_()
    return model


def memory_of(hidden_size: int) -> ContextConfig:
    """Configure one layer of kernel attention, whose heads share a gate.

    Features of keys of zeros are ones, so the clamp is the denominator of an endless text: in a short one a token's
    weight is no larger than it is in a long one.
    """
    heads = max(1, hidden_size // HEAD_SIZE)
    heads = heads if hidden_size % heads == 0 else 1
    mixer = {
        "kind": "elu",
        "hidden_size": hidden_size,
        "num_heads": heads,
        "gated": True,
        "shared_gate": True,
        "short_convolution": 0,
        "denominator": {"kind": "abs_clamp", "eps": float(hidden_size // heads)},
    }
    return ContextConfig.model_validate({"num_layers": 1, "mlp_size": MLP_SIZE, "mixer": mixer})


def remember(model: StreamEncoder, tokens: float = MEMORY_TOKENS, share: float = MEMORY_SHARE) -> StreamEncoder:
    """Set the context of `memory_of` to add to each token `share` of a decaying mean of the text so far.

    Queries and keys are zeros, so that every earlier token has the weight (1 - exp(-1 / tokens)) exp(-age / tokens),
    which sum to one when the text is long: the beginning of a text has little behind it and gets little. The norm
    before the layer divides each token by the deviation of its numbers; the mean of these, over tokens drawn at random,
    is put back.
    """
    (block,) = cast(list[Block], list(model.context))
    mixer, size = cast(CausalKernelAttention, block.mixer), model.hidden_size
    draw = torch.Generator("cpu").manual_seed(0)
    drawn = torch.randint(model.vocab_size, (8, model.config.block), generator=draw, device="cpu")
    one_DD = torch.eye(size, device=model.device)
    with torch.no_grad():
        deviation = model.blocks_hidden(drawn).std(dim=-1).mean()
        for parameter in mixer.parameters():
            parameter.zero_()
        mixer.qkv.weight[-size:].copy_(one_DD)
        mixer.out.weight.copy_(one_DD * share * deviation)
        cast(nn.Linear, mixer.gate).bias.fill_(-math.log(math.expm1(1 / tokens)))
    return model


def convert_sentence_encoder(
    folder: str | Path, out: Path, block: int = BLOCK, context: ContextConfig | None = None
) -> dict[str, Any]:
    """Write the text encoder of a folder, or of a name, as a stream encoder to `out`; returns what was done.

    Without a `context`, which would have to be trained, it remembers as `remember` says. Matrices are kept in float16.

    Raises: ModelFolderError for a folder of another kind, or without a tokeniser; ConfigError as
        `begin_stream_encoder`.
    """
    source = resolve_model_folder(folder)
    teacher, tokeniser = load_text_encoder(source), load_tokeniser(source)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # of what is trained later: the same folder each time
        model = begin_stream_encoder(teacher, block, context or memory_of(teacher.config.encoder.hidden_size))
    if context is None:
        remember(model)
    about = {"folder": source.resolve().name, "to": "stream", "block": block}
    save_model(model.eval(), out, tokeniser=tokeniser, half=True, facts={"converted_from": about})
    return {**about, "parameters": sum(p.numel() for p in model.parameters()), "out": str(out)}
