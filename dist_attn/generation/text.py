"""Text after a prompt: a model folder and bytes in, UTF-8 text out as it is drawn."""

import time
from collections.abc import Callable
from typing import Any

from dist_attn.checkpoints import load_model_and_tokeniser, resolve_model_folder
from dist_attn.devices import ON_CPU, Compute
from dist_attn.errors import InputError
from dist_attn.generation.decode import generate
from dist_attn.models import weight_bytes, weight_precision_of
from dist_attn.text import IncrementalDecoder, end_tokens
from dist_attn.wire.choices import WeightPrecision
from dist_attn.wire.messages import SamplingSpec
from dist_attn.wire.specs import check_sampling

__all__ = ["generate_text"]


def generate_text(
    model_name: str | None,
    data: bytes,
    spec: SamplingSpec,
    on_text: Callable[[str], None] = lambda _: None,
    *,
    weights: WeightPrecision = "float32",
    compute: Compute = ON_CPU,
    tell: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Continue the text in `data` under a model folder or shipped model, with a report in plain values.

    `weights` is the precision of the model's weights in memory; the report has their bytes. `compute` is the device and
    the precision of products, which `tell` gets in words before the work begins.
    `on_text` gets each piece of text as soon as it is certain: a character split over tokens waits until it is whole.
    `seconds` and the speed are those of prefill and drawing; loading the model is not counted.

    Raises: InputError for an empty prompt or an unusable specification, ModelFolderError for an unusable model.
    """
    check_sampling(spec)
    if not data:
        raise InputError("the prompt is empty; give at least one byte of text to continue")
    folder = resolve_model_folder(model_name)
    model, tokeniser = load_model_and_tokeniser(folder, weights=weights)
    tell(compute.sentence(weights=weights))
    decoder, pieces = IncrementalDecoder(tokeniser), list[str]()

    def show(text: str) -> None:
        if text:
            pieces.append(text)
            on_text(text)

    model = model.to(compute.device)
    started = time.perf_counter()
    with compute.autocast():
        drawn = generate(
            model,
            tokeniser.encode_whole(data, framed=True),
            spec,
            end_tokens=end_tokens(tokeniser, folder, model.vocab_size),
            on_token=lambda token: show(decoder.push(token)),
        )
    show(decoder.finish())
    seconds = time.perf_counter() - started
    return {
        "text": "".join(pieces),
        "tokens": len(drawn),
        "finish_reason": "length" if len(drawn) == spec.max_tokens else "stop",
        "seconds": round(seconds, 3),
        "tokens_per_second": round(len(drawn) / seconds, 1),
        "model": folder.name,
        "weights": weight_precision_of(model),
        "weights_bytes": weight_bytes(model),
    }
