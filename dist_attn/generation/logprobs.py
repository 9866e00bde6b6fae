"""How likely a model found a drawn token, and which ones it found likeliest."""

import torch

from dist_attn.wire.messages import TokenLogprobs

__all__ = ["sequence_scores", "token_logprobs"]


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


def sequence_scores(logits_LV: torch.Tensor, targets_L: torch.Tensor, count: int) -> torch.Tensor:
    """The scores of `targets_L`, each under the logits before it, as rows of numbers.

    A row has the target's log-probability, the ids of the `count` likeliest tokens and their log-probabilities, as
    `token_logprobs` tells them; where the vocabulary has fewer tokens, the rest are at -inf.

    Shapes: logits [L, V], targets [L] int64 on the same device -> [L, 1 + 2 count] float32 on the CPU.
    """
    logprobs_LV = logits_LV.detach().to(torch.float64).log_softmax(1)
    columns, values = [logprobs_LV.gather(1, targets_L[:, None])], []
    for _ in range(count):
        # One maximum at a time: the first of equals, which torch.topk does not promise, without sorting them all.
        ids_L1 = logprobs_LV.argmax(1, keepdim=True)
        columns.append(ids_L1.to(torch.float64))
        values.append(logprobs_LV.gather(1, ids_L1))
        logprobs_LV.scatter_(1, ids_L1, -torch.inf)
    return torch.cat(columns + values, dim=1).to(device="cpu", dtype=torch.float32)
