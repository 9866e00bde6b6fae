"""Bits per byte of a text under a language model, read as one stream with the state carried on."""

import math
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from dist_attn.checkpoints import load_model_and_tokeniser, resolve_model_folder
from dist_attn.errors import InputError
from dist_attn.models import LanguageModel

__all__ = ["Score", "evaluate_file", "score_tokens"]

_BLOCK_TOKENS = 4096


@dataclass(frozen=True)
class Score:
    """What a model paid for a text; the first token is scored without context as 1 / vocabulary."""

    bits: float
    num_tokens: int
    num_bytes: int

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte of the original text."""
        return self.bits / self.num_bytes


@torch.inference_mode()
def score_tokens(model: LanguageModel, tokens: np.ndarray, num_bytes: int) -> Score:
    """Score `tokens`, which spell `num_bytes` bytes, each given all the tokens before it.

    Raises: InputError for an empty text.
    """
    if not len(tokens) or not num_bytes:
        raise InputError("the text is empty; scoring needs at least one byte")
    stream = torch.from_numpy(tokens.astype(np.int64))[None]
    nats = math.log(model.config.vocab_size)
    state = model.initial_state(1)
    for start in range(0, stream.shape[1] - 1, _BLOCK_TOKENS):
        inputs = stream[:, start : min(start + _BLOCK_TOKENS, stream.shape[1] - 1)]
        h_BLD, state = model.hidden(inputs, state=state)
        targets = stream[0, start + 1 : start + 1 + inputs.shape[1]]
        nats += float(F.cross_entropy(model.readout(h_BLD[0]).float(), targets, reduction="sum"))
    return Score(bits=nats / math.log(2), num_tokens=len(tokens), num_bytes=num_bytes)


def evaluate_file(name: Path, data: bytes, model_name: str | None) -> dict[str, float | int | str]:
    """Bits per byte of a file's bytes under a model folder or shipped model, as plain values.

    Raises: InputError for an empty file, ModelFolderError for an unusable model.
    """
    started = time.perf_counter()
    if not data:
        raise InputError(f"{name} is empty; scoring needs at least one byte")
    folder = resolve_model_folder(model_name)
    model, tokeniser = load_model_and_tokeniser(folder)
    score = score_tokens(model, tokeniser.encode(data), len(data))
    return {
        "bits_per_byte": round(score.bits_per_byte, 5),
        "tokens": score.num_tokens,
        "bytes": score.num_bytes,
        "seconds": round(time.perf_counter() - started, 3),
        "model": folder.name,
    }
