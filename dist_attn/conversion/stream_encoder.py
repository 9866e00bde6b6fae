"""From a sentence encoder to a stream encoder that begins with the same hidden states."""

from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from dist_attn.checkpoints import load_text_encoder, save_model
from dist_attn.errors import ConfigError
from dist_attn.model_config.refusal import refusal
from dist_attn.models import ContextConfig, StreamEncoder, StreamEncoderConfig, TextEncoder, build_model
from dist_attn.shipped import resolve_model_folder
from dist_attn.text import load_tokeniser

__all__ = ["begin_stream_encoder", "convert_sentence_encoder"]


def begin_stream_encoder(teacher: TextEncoder, block: int, context: ContextConfig | None = None) -> StreamEncoder:
    """A stream encoder with the teacher's weights, whose `context` adds nothing until it is trained.

    A block may be longer than the teacher reads at once, as far as its positions reach.

    Raises: ConfigError for a block that is too long or does not divide the grid of 512 tokens, a context of another
        width, and a teacher that pools by its first token.
    """
    sentence = teacher.config.model_dump()
    frame = len(teacher.config.prefix) + len(teacher.config.suffix)
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


def convert_sentence_encoder(
    folder: str | Path, out: Path, block: int, context: ContextConfig | None = None
) -> dict[str, Any]:
    """Write the text encoder of a folder, or of a name, as a stream encoder to `out`; what was done, as plain values.

    Raises: ModelFolderError for a folder of another kind, or without a tokeniser; ConfigError as
        `begin_stream_encoder`.
    """
    source = resolve_model_folder(folder)
    model = begin_stream_encoder(load_text_encoder(source), block, context).eval()
    about = {"folder": source.resolve().name, "block": block}
    save_model(model, out, tokeniser=load_tokeniser(source), facts={"converted_from": about})
    return {**about, "parameters": sum(p.numel() for p in model.parameters()), "out": str(out)}
