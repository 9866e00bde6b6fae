"""How likely a model found a drawn token, and which ones it found likeliest."""

import torch

from dist_attn.wire.messages import TokenLogprobs

__all__ = ["token_logprobs"]


def token_logprobs(logits_V: torch.Tensor, token: int, count: int | None) -> TokenLogprobs | None:
    """Log-probabilities of `token` and of the `count` likeliest tokens; None where `count` is None.

    The softmax is that of the logits as they are, in float64: temperature, top_k and top_p do not enter. Among equals
    the lower id comes first.

    Shapes: logits [V].
    """
    if count is None:
        return None
    logprobs_V = logits_V.detach().to(device="cpu", dtype=torch.float64).log_softmax(0)
    values_V, ids_V = logprobs_V.sort(descending=True, stable=True)
    return TokenLogprobs(float(logprobs_V[token]), ids_V[:count].tolist(), values_V[:count].tolist())
