"""The likeliest text after a prompt, by beam search: a model folder and bytes in, UTF-8 text out."""

import time
from collections.abc import Callable
from typing import Any

from dist_attn.checkpoints import load_model_and_tokeniser, resolve_model_folder
from dist_attn.devices import ON_CPU, Compute
from dist_attn.errors import InputError
from dist_attn.models import weight_bytes, weight_precision_of
from dist_attn.text import end_tokens
from dist_attn.wire.choices import WeightPrecision
from dist_attn_papers.translation.beam_search import BeamSpec, beam_search

__all__ = ["search_text"]


def search_text(
    model_name: str | None,
    data: bytes,
    spec: BeamSpec,
    *,
    weights: WeightPrecision = "float32",
    compute: Compute = ON_CPU,
    tell: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """The best continuation that a beam search finds, with a report in plain values.

    Raises: as `generate_text`.
    """
    if not data:
        raise InputError("the prompt is empty; give at least one byte of text to continue")
    folder = resolve_model_folder(model_name)
    model, tokeniser = load_model_and_tokeniser(folder, weights=weights)
    tell(compute.sentence(weights=weights))
    model = model.to(compute.device)
    started = time.perf_counter()
    prompts = [tokeniser.encode_whole(data, framed=True)]
    ends = end_tokens(tokeniser, folder, model.vocab_size)
    with compute.autocast():
        ((best, *_),) = beam_search(model, prompts, spec, end_tokens=ends)
    seconds = time.perf_counter() - started
    return {
        "text": tokeniser.decode(list(best.tokens)).decode(errors="replace"),
        "tokens": len(best.tokens),
        "finish_reason": "stop" if best.ended else "length",
        "log_probability": round(best.log_probability, 4),
        "score": round(best.score, 4),
        "seconds": round(seconds, 3),
        "model": folder.name,
        "weights": weight_precision_of(model),
        "weights_bytes": weight_bytes(model),
    }
