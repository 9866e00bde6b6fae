"""Beam search: the likeliest continuations that a search of some width finds, over any state that can be reordered.

Letters: B sequences, W beams of each, N = B W rows of a step, V vocabulary, L tokens of a prompt, S of a source.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol, Self, TypeVar

import numpy as np
import torch

from dist_attn.errors import EngineError, InputError
from dist_attn.generation.decode import prefill
from dist_attn.models import CausalModel, ModelState
from dist_attn.text.base import Tokens
from dist_attn_papers.translation.model import EncoderDecoder

_AT_ONCE = 32  # sources that are translated side by side


class Reorderable(Protocol):
    """The state of several sequences, of which some can be taken out, in any order and more than once."""

    def select(self, index: list[int]) -> Self: ...


State = TypeVar("State", bound=Reorderable)
Step = Callable[[torch.Tensor, State], tuple[torch.Tensor, State]]
"""Feeds one token to each sequence, [N] and a state -> logits [N, V] and the state after it."""


@dataclass(frozen=True)
class BeamSpec:
    """The width of a beam search, the most tokens of a continuation, and the penalty of its length.

    Raises: InputError for numbers that are not usable.
    """

    width: int = 4
    max_tokens: int = 64
    penalty: float = 0.6

    def __post_init__(self) -> None:
        if self.width < 1 or self.max_tokens < 1:
            raise InputError(f"width {self.width} and max_tokens {self.max_tokens} must be 1 or more")
        if not 0 <= self.penalty < float("inf"):
            raise InputError(f"the length penalty {self.penalty} must be a finite number >= 0; 0 compares sums")


@dataclass(frozen=True)
class Hypothesis:
    """One continuation: its tokens without the end token, the logarithm of its probability, and its penalised score."""

    tokens: tuple[int, ...]
    log_probability: float
    score: float
    ended: bool


def length_penalty(length: int, penalty: float) -> float:
    """((5 + length) / 6)^penalty, by which log-probabilities are divided; the end token counts as a token.

    Reference: Wu et al. 2016, Google's Neural Machine Translation System, Eq. 14.
    """
    return float(((5 + length) / 6) ** penalty)


def beam_search(
    model: CausalModel, prompts: Sequence[Tokens], spec: BeamSpec, *, end_tokens: Collection[int] = ()
) -> list[list[Hypothesis]]:
    """Find hypotheses for each prompt, best first; prompts whose states have one shape go side by side.

    Raises: InputError for an empty prompt; TokenError for ids the model does not know; EngineError for logits of NaN.
    """
    prompts_L = [torch.as_tensor(list(prompt), dtype=torch.int64, device="cpu") for prompt in prompts]
    if not all(len(prompt_L) for prompt_L in prompts_L):
        raise InputError("a prompt has no tokens; give at least one, for example the tokeniser's end token")
    by_row: list[list[Hypothesis]] = [[] for _ in prompts]
    with torch.inference_mode():
        states = [prefill(model, prompt_L[:-1]) for prompt_L in prompts_L]
        for rows in _alike(states):
            last_B = torch.stack([prompts_L[row][-1] for row in rows])
            results = search(model.step, ModelState.stack([states[row] for row in rows]), last_B, spec, end_tokens)
            for row, hypotheses in zip(rows, results, strict=True):
                by_row[row] = hypotheses
    return by_row


@torch.inference_mode()
def translate(
    model: EncoderDecoder, sources: Sequence[Tokens], spec: BeamSpec, *, end_token: int
) -> list[list[Hypothesis]]:
    """Find hypotheses for each source, its end token included, best first.

    A target begins with the end token, as in training, and has at most `spec.max_tokens` tokens, and at most 2 S + 10
    for a source of S tokens. Width 1 is the greedy choice.

    Raises: InputError for a source without tokens; TokenError for ids the model does not know; EngineError for logits
    of NaN.
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


def search(
    step: Step[State], state: State, last_B: torch.Tensor, spec: BeamSpec, end_tokens: Collection[int] = ()
) -> list[list[Hypothesis]]:
    """The search itself, for B sequences side by side: `last_B` is fed first, `state` is the one before it.

    At every step a sequence keeps the `width` likeliest prefixes. One that ends leaves the beam and takes its place
    with it, so width 1 is the greedy choice, and a width of all sequences there are is an exhaustive search. What is
    left after `max_tokens` counts as it is.

    Cost: max_tokens steps over B x width sequences, whose states are copied once a step.
    Raises: EngineError for logits that allow no choice.
    """
    batch, width = last_B.shape[0], spec.width
    state = state.select([row for row in range(batch) for _ in range(width)])
    token_N = last_B.repeat_interleave(width)
    # All beams of a sequence start alike: only the first may continue.
    scores_BW = torch.full((batch, width), float("-inf"), dtype=torch.float64, device="cpu")
    scores_BW[:, 0] = 0.0
    beams = [_Beams(spec) for _ in range(batch)]
    for _ in range(spec.max_tokens):
        logits_NV, state = step(token_N, state)
        totals_BWV = scores_BW[..., None] + _log_probabilities(logits_NV).unflatten(0, (batch, width))
        origins, tokens = [], []
        for row, own in enumerate(beams):
            scores_BW[row], origin, token = own.advance(totals_BWV[row], end_tokens)
            origins += [row * width + beam for beam in origin]
            tokens += token
        if bool(scores_BW.isneginf().all()):
            break
        state, token_N = state.select(origins), torch.tensor(tokens, device="cpu")
    return [own.results() for own in beams]


@dataclass
class _Beams:
    """The prefixes of one sequence, live and ended."""

    spec: BeamSpec
    live: list[tuple[tuple[int, ...], float]] = field(default_factory=lambda: [((), 0.0)])
    ended: list[Hypothesis] = field(default_factory=list)

    def advance(
        self, totals_WV: torch.Tensor, end_tokens: Collection[int]
    ) -> tuple[torch.Tensor, list[int], list[int]]:
        """Keep the best continuations: their scores [W], the beam each comes from and its token; -inf is none."""
        width, vocab_size = totals_WV.shape
        # Stable: among equals the lower beam and the lower token come first, so a search can be repeated.
        sorted_N, order_N = totals_WV.flatten().sort(descending=True, stable=True)
        scores_W = torch.full((width,), float("-inf"), dtype=torch.float64, device="cpu")
        origins, tokens = [0] * width, [0] * width
        live: list[tuple[tuple[int, ...], float]] = []
        kept = width - len(self.ended)
        for value, place in zip(sorted_N[:kept].tolist(), order_N[:kept].tolist(), strict=True):
            if value == float("-inf"):
                break
            beam, token = divmod(place, vocab_size)
            prefix = self.live[beam][0]
            if token in end_tokens:
                self.ended.append(self._hypothesis(prefix, value, ended=True))
                continue
            scores_W[len(live)], origins[len(live)], tokens[len(live)] = value, beam, token
            live.append(((*prefix, token), value))
        self.live = live
        return scores_W, origins, tokens

    def results(self) -> list[Hypothesis]:
        """All that ended and what is still live, best score first."""
        unfinished = [self._hypothesis(prefix, value, ended=False) for prefix, value in self.live]
        return sorted(self.ended + unfinished, key=lambda hypothesis: -hypothesis.score)

    def _hypothesis(self, prefix: tuple[int, ...], value: float, *, ended: bool) -> Hypothesis:
        score = value / length_penalty(len(prefix) + ended, self.spec.penalty)
        return Hypothesis(prefix, value, score, ended)


def _log_probabilities(logits_NV: torch.Tensor) -> torch.Tensor:
    # Float64 on the CPU, as draws are: thousands of terms are added up and compared.
    logits_NV = logits_NV.detach().to(device="cpu", dtype=torch.float64)
    if bool((logits_NV.isnan() | logits_NV.isposinf()).any()) or bool(logits_NV.isneginf().all(dim=-1).any()):
        raise EngineError(
            "the model gave NaN or +inf, or ruled out every token; nothing can be chosen from such logits. Its weights "
            "or its state are damaged: load the model again"
        )
    return logits_NV.log_softmax(dim=-1)


def _alike(states: list[ModelState]) -> list[list[int]]:
    """Group the rows whose states have the same shapes, and so can be stacked."""
    groups: dict[tuple[torch.Size, ...], list[int]] = {}
    for row, state in enumerate(states):
        groups.setdefault(state.shapes(), []).append(row)
    return list(groups.values())
