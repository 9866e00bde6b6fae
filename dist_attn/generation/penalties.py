"""What a request adds to the logits before a draw: biases of tokens, penalties on those that were drawn already."""

from collections.abc import Mapping

import torch

from dist_attn.errors import EngineError
from dist_attn.wire.messages import SamplingSpec

__all__ = ["adjust_logits"]


def adjust_logits(logits_V: torch.Tensor, spec: SamplingSpec, counts: Mapping[int, int]) -> torch.Tensor:
    """The logits that are drawn from: l + bias - frequency_penalty * c - presence_penalty * [c > 0].

    `counts` says how often (c) each token was drawn before; tokens of the prompt do not count. Without bias and
    penalties these are the given logits themselves. The rows of a batch and the order of `counts` change no bit.

    Shapes: logits [V] float64 on the CPU -> [V].
    Raises: EngineError for a bias on a token that the model does not have.
    Reference: Keskar et al. 2019 penalise what was drawn by division; this is OpenAI's form, by subtraction.
    """
    if not spec.adjusts:
        return logits_V
    outside = [token for token in spec.logit_bias if not 0 <= token < len(logits_V)]
    if outside:
        raise EngineError(f"logit_bias names token {outside[0]}; the model has tokens 0 to {len(logits_V) - 1}")
    adjusted_V = logits_V.clone()
    if spec.logit_bias:
        ids_N = torch.tensor(list(spec.logit_bias), dtype=torch.int64)
        adjusted_V[ids_N] += torch.tensor(list(spec.logit_bias.values()), dtype=torch.float64)
    if counts and spec.penalises:
        ids_N = torch.tensor(list(counts), dtype=torch.int64)
        times_N = torch.tensor(list(counts.values()), dtype=torch.float64)
        adjusted_V[ids_N] -= spec.frequency_penalty * times_N + spec.presence_penalty
    return adjusted_V
