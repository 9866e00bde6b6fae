"""Translations: for each source the targets that a beam search finds; sources of one length go side by side."""

from collections.abc import Sequence

import numpy as np
import torch

from dist_attn.errors import InputError
from dist_attn.generation.beam_search import BeamSpec, Hypothesis, search
from dist_attn.models import EncoderDecoder
from dist_attn.text.base import Tokens

_AT_ONCE = 32


@torch.inference_mode()
def translate(
    model: EncoderDecoder, sources: Sequence[Tokens], spec: BeamSpec, *, end_token: int
) -> list[list[Hypothesis]]:
    """For each source, its end token included, the hypotheses that were found, best first.

    A target begins with its end token, as in training, and has at most `spec.max_tokens` tokens and twice those of its
    source and ten more. Width 1 is the greedy choice.

    Raises: InputError for a source without tokens; TokenError for ids the model does not know.
    """
    lengths = [len(source) for source in sources]
    if 0 in lengths:
        raise InputError(f"source {lengths.index(0)} has no tokens; give at least its end token")
    by_row: list[list[Hypothesis]] = [[] for _ in sources]
    for length in sorted(set(lengths)):
        rows = [row for row, own in enumerate(lengths) if own == length]
        limit = BeamSpec(spec.width, min(spec.max_tokens, 2 * length + 10), spec.penalty)
        for start in range(0, len(rows), _AT_ONCE):
            some = rows[start : start + _AT_ONCE]
            source_BS = torch.from_numpy(np.array([np.asarray(sources[row]) for row in some], dtype=np.int64))
            begin_B = torch.full((len(some),), end_token, device="cpu")
            _, state = model.decode(begin_B[:, None][:, :0], model.encode(source_BS))
            for row, hypotheses in zip(some, search(model.step, state, begin_B, limit, (end_token,)), strict=True):
                by_row[row] = hypotheses
    return by_row
