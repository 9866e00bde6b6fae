"""Drawing the next token of each sequence, and how likely the model found it; a sequence's draws are its own.

Letters: B sequences, L tokens, V vocabulary, N tokens that a request names.
"""

import math
from collections.abc import Collection, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from dist_attn.errors import EngineError, ShapeError
from dist_attn.wire.messages import SamplingSpec, TokenLogprobs


def generator_for(spec: SamplingSpec, request: int, draws: int = 0) -> torch.Generator:
    """The random numbers of one request after `draws` drawn tokens: those of its seed, or fresh ones where it is None.

    The seed alone decides: two requests with the same seed draw the same tokens.
    """
    generator = _generator(spec, request)
    if spec.temperature:  # every draw takes one number then, else none
        torch.rand(draws, generator=generator, dtype=torch.float64, device="cpu")
    return generator


def _generator(spec: SamplingSpec, request: int) -> torch.Generator:
    if spec.seed is not None:
        # torch keeps the low 32 bits of a seed: all 64 are mixed first, or -1 and 2**63 - 1 would be one seed.
        mixed = np.random.SeedSequence(spec.seed % (1 << 64)).generate_state(1, np.uint32)
        return torch.Generator().manual_seed(int(mixed[0]))
    fresh = np.random.SeedSequence(spawn_key=(request,)).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(fresh[0]))


def sample(
    logits_BV: torch.Tensor,
    specs: list[SamplingSpec],
    generators: list[torch.Generator],
    counts: Sequence[Mapping[int, int]] | None = None,
    barred: Sequence[Collection[int]] | None = None,
    allowed: Sequence[NDArray[np.bool_] | None] | None = None,
) -> list[int]:
    """Draw one token for each sequence: biases and penalties, top_k and min_p, then top_p of what they left.

    `counts` says how often each sequence has drawn which token so far; None: nothing was drawn yet. `barred` names
    tokens of each sequence that are not drawn unless no others are left, `allowed` says of each token whether it may be
    drawn, where a sequence follows a grammar.

    Temperature 0 takes the largest logit, the lowest id among equals, and leaves the generator untouched; every
    other draw takes exactly one random number. A logit of -inf is never drawn.

    Shapes: logits [B, V] of any floating type on any device; B specs, B generators on the CPU -> B ids.
    Raises: ShapeError when the numbers differ; EngineError for logits that allow no draw.
    Reference: top_p is nucleus sampling, Holtzman et al. 2020; min_p is Nguyen et al. 2024, in vLLM's order.
    """
    if logits_BV.dim() != 2 or not len(logits_BV) == len(specs) == len(generators) or not logits_BV.shape[1]:
        raise ShapeError(
            f"logits of shape {list(logits_BV.shape)} came with {len(specs)} specifications and {len(generators)} "
            "generators; needed is [B, V] with B of each"
        )
    # Float64 on the CPU, row by row: no row of a batch can change the rounding of another, nor can the device.
    rows = logits_BV.detach().to(device="cpu", dtype=torch.float64)
    drawn = []
    for row, (logits_V, spec, generator) in enumerate(zip(rows, specs, generators, strict=True)):
        _check_row(logits_V, row)
        from_V = adjust_logits(logits_V, spec, {} if counts is None else counts[row])
        allowed_V = None if allowed is None else allowed[row]
        if allowed_V is not None:
            from_V = from_V.masked_fill(torch.from_numpy(~allowed_V), -torch.inf)
            _check_row(from_V, row)
        if barred is not None and barred[row]:
            others_V = from_V.clone()
            others_V[list(barred[row])] = -torch.inf
            from_V = from_V if bool(others_V.isneginf().all()) else others_V
        drawn.append(int(from_V.argmax()) if spec.temperature == 0 else _draw(from_V, spec, generator))
    return drawn


def adjust_logits(logits_V: torch.Tensor, spec: SamplingSpec, counts: Mapping[int, int]) -> torch.Tensor:
    """The logits that are drawn from: r(l) + bias - frequency_penalty * c - presence_penalty * [c > 0].

    `counts` says how often (c) each token was drawn before; tokens of the prompt count for r alone, which divides what
    is above 0 by `repetition_penalty` and multiplies the rest, as transformers does. Without bias and penalties these
    are the given logits themselves. The rows of a batch and the order of `counts` change no bit.

    Shapes: logits [V] float64 on the CPU -> [V].
    Raises: EngineError for a bias on a token that the model does not have, and for a prompt with one.
    References: Keskar et al. 2019 for r; the other two are OpenAI's form, by subtraction.
    """
    if not spec.adjusts:
        return logits_V
    prompt = np.frombuffer(spec.prompt_tokens, np.int32)  # in order
    for where, tokens in (("logit_bias", spec.logit_bias), ("the prompt", (*prompt[:1], *prompt[-1:]))):
        outside = [token for token in tokens if not 0 <= token < len(logits_V)]
        if outside:
            raise EngineError(f"{where} names token {outside[0]}; the model has tokens 0 to {len(logits_V) - 1}")
    adjusted_V = logits_V.clone()
    if spec.repetition_penalty != 1:
        seen_V = torch.zeros(len(logits_V), dtype=torch.bool, device="cpu")
        seen_V[torch.tensor(prompt, dtype=torch.int64, device="cpu")] = True
        seen_V[torch.tensor([*counts], dtype=torch.int64, device="cpu")] = True
        less_V = torch.where(logits_V < 0, logits_V * spec.repetition_penalty, logits_V / spec.repetition_penalty)
        adjusted_V = torch.where(seen_V, less_V, logits_V)
    if spec.logit_bias:
        ids_N = torch.tensor(list(spec.logit_bias), dtype=torch.int64, device="cpu")
        adjusted_V[ids_N] += torch.tensor(list(spec.logit_bias.values()), dtype=torch.float64, device="cpu")
    if counts and spec.penalises:
        ids_N = torch.tensor(list(counts), dtype=torch.int64, device="cpu")
        times_N = torch.tensor(list(counts.values()), dtype=torch.float64, device="cpu")
        adjusted_V[ids_N] -= spec.frequency_penalty * times_N + spec.presence_penalty
    return adjusted_V


def _draw(logits_V: torch.Tensor, spec: SamplingSpec, generator: torch.Generator) -> int:
    """Draw one id from the filtered distribution, by inverting its cumulative sum at one random number."""
    # Values alone, by numpy: torch takes 35 times as long. The last line finds the id: of equal logits the lower first.
    sorted_V = torch.from_numpy(np.sort(logits_V.numpy())).flip(0)
    if spec.top_k:
        sorted_V = sorted_V[: spec.top_k]
    # The maximum is subtracted before the division: a tiny temperature then gives exp(-inf) = 0 and no inf - inf.
    weights_V = torch.from_numpy(np.exp(((sorted_V - sorted_V[0]) / spec.temperature).numpy()))
    if spec.min_p:
        # The largest weight is 1, so each is its probability over the largest one.
        weights_V = weights_V[weights_V >= spec.min_p]
    sums_V = weights_V.cumsum(0)
    if spec.top_p < 1:
        # A token stays while those before it do not reach top_p yet, so the first one always stays.
        kept = 1 + int((sums_V[:-1] < spec.top_p * sums_V[-1]).sum())
        sums_V = sums_V[:kept]
    point = torch.rand((), generator=generator, dtype=torch.float64, device="cpu") * sums_V[-1]
    # The first sum above the point: a weight of 0 adds nothing to its sum and so is never the first.
    place = min(int(torch.searchsorted(sums_V, point, right=True)), int(torch.searchsorted(sums_V, sums_V[-1])))
    drawn = sorted_V[place]
    return int((logits_V == drawn).nonzero()[place - int((logits_V > drawn).sum())])


def _check_row(logits_V: torch.Tensor, row: int) -> None:
    """Raise EngineError for NaN, for +inf, and where every token is ruled out."""
    if math.isfinite(logits_V.amax()):  # which is NaN where any is
        return
    broken = int((logits_V.isnan() | logits_V.isposinf()).sum())
    if broken:
        raise EngineError(
            f"the model gave NaN or +inf for {broken} of the {len(logits_V)} logits of sequence {row} in the batch; "
            "nothing can be drawn from them. Its weights or the state are damaged: load the model again, or begin with "
            "another state"
        )
    raise EngineError(f"all {len(logits_V)} logits of sequence {row} in the batch are -inf, so no token is left")


def token_logprobs(logits_V: torch.Tensor, token: int, count: int | None) -> TokenLogprobs | None:
    """Log-probabilities of `token` and of the `count` likeliest tokens; None where `count` is None.

    The softmax is that of the logits as they are, in float64: temperature, top_k and top_p do not enter. Among equals
    the lower id comes first.

    Shapes: logits [V].
    """
    if count is None:
        return None
    logprobs_V = logits_V.detach().to(device="cpu", dtype=torch.float64).log_softmax(0)
    least = logprobs_V.topk(min(count, len(logprobs_V))).values.amin() if count else torch.inf
    ids_N = (logprobs_V >= least).nonzero()[:, 0]  # perhaps more than `count` of them, where some are equal
    values_N, order_N = logprobs_V[ids_N].sort(descending=True, stable=True)
    return TokenLogprobs(float(logprobs_V[token]), ids_N[order_N][:count].tolist(), values_N[:count].tolist())


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
