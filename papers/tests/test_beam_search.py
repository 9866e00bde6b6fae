"""Beam search finds what a naive search over all sequences finds, for any mixer, alone and in a batch."""

from itertools import product

import pytest
import torch

from dist_attn.errors import EngineError, InputError
from dist_attn.generation import generate
from dist_attn.models import LanguageModel
from dist_attn.wire.messages import SamplingSpec
from dist_attn_papers.translation.beam_search import BeamSpec, Hypothesis, beam_search, length_penalty, search
from tests.support.models import small_config, small_model

VOCAB, LENGTH, END = 4, 4, 2
PROMPTS = [[1, 3, 0], [0], [3, 3]]


def _model(kind: str = "rfa_gate") -> LanguageModel:
    return small_model(small_config(kind, vocab_size=VOCAB)).double()


def _naive(model: LanguageModel, prompt: list[int], penalty: float) -> list[Hypothesis]:
    """Every sequence there is, each scored by one full forward pass, best first."""
    found = set()
    for drawn in product(range(VOCAB), repeat=LENGTH):
        ended = END in drawn
        tokens = drawn[: drawn.index(END)] if ended else drawn
        length = len(tokens) + ended
        with torch.no_grad():
            logits = model.logits(torch.tensor([prompt + list(drawn[:length])]))[0]
        chosen = logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(1, torch.tensor(drawn[:length])[:, None])
        value = round(float(chosen.sum()), 9)
        found.add(Hypothesis(tokens, value, round(value / ((5 + length) / 6) ** penalty, 9), ended))
    return sorted(found, key=lambda hypothesis: -hypothesis.score)


def _rounded(hypotheses: list[Hypothesis]) -> list[Hypothesis]:
    return [Hypothesis(h.tokens, round(h.log_probability, 9), round(h.score, 9), h.ended) for h in hypotheses]


@pytest.mark.parametrize("penalty", [0.0, 0.6, 3.0])
@pytest.mark.parametrize("kind", ["rfa_gate", "softmax"])
def test_a_wide_beam_is_the_naive_search(kind: str, penalty: float) -> None:
    """A beam as wide as there are sequences finds every one of them, with its probability and score, in order."""
    model = _model(kind)
    (found,) = beam_search(model, PROMPTS[:1], BeamSpec(VOCAB**LENGTH, LENGTH, penalty), end_tokens=[END])
    naive = _naive(model, PROMPTS[0], penalty)
    assert len(found) == len(naive) > 80
    by_tokens = {(h.tokens, h.ended): h for h in naive}
    assert {(h.tokens, h.ended): h for h in found}.keys() == by_tokens.keys()
    for got, want in zip(found, naive, strict=True):
        assert (got.score, got.log_probability) == pytest.approx((want.score, want.log_probability), abs=1e-8)
    assert found[0].tokens == naive[0].tokens


def test_a_narrow_beam_finds_good_sequences() -> None:
    """A beam of 8 finds the likeliest of all 4^4 sequences here, and every hypothesis has its true probability."""
    model = _model()
    naive = {h.tokens: h for h in _naive(model, PROMPTS[0], 0.6)}
    (found,) = beam_search(model, PROMPTS[:1], BeamSpec(8, LENGTH, 0.6), end_tokens=[END])
    assert len(found) == 8
    assert found[0].tokens == next(iter(naive))
    assert [h.log_probability for h in found] == pytest.approx(
        [naive[h.tokens].log_probability for h in found], abs=1e-8
    )


@pytest.mark.parametrize("end_tokens", [(), (0,), (1,), (2,), (3, 1)])
def test_width_one_is_greedy(end_tokens: tuple[int, ...]) -> None:
    """With one beam the tokens are those of greedy generation, up to and without the end token."""
    model = _model()
    for prompt in PROMPTS:
        (found,) = beam_search(model, [prompt], BeamSpec(1, 12), end_tokens=end_tokens)
        greedy = generate(model, prompt, SamplingSpec(max_tokens=12, temperature=0.0), end_tokens=end_tokens)
        assert [list(h.tokens) for h in found] == [greedy]
        assert found[0].ended == (len(greedy) < 12)


@pytest.mark.parametrize("kind", ["rfa_gate", "softmax"])
def test_prompts_do_not_touch_each_other(kind: str) -> None:
    """Prompts of different lengths in one call find what each finds alone."""
    model, spec = _model(kind), BeamSpec(3, 6)
    together = beam_search(model, PROMPTS, spec, end_tokens=[END])
    alone = [beam_search(model, [prompt], spec, end_tokens=[END])[0] for prompt in PROMPTS]
    assert [_rounded(found) for found in together] == [_rounded(found) for found in alone]
    assert len({found[0].tokens for found in together}) > 1


class _Nothing:
    """The state of a source without memory."""

    def select(self, index: list[int]) -> "_Nothing":
        return self


def test_a_larger_penalty_favours_longer_sequences() -> None:
    """Of a source that ends after each token with 0.4, the best hypothesis is empty, and grows with the penalty."""
    logits_V = torch.tensor([0.4, 0.35, 0.25]).log()

    def step(token_N: torch.Tensor, state: _Nothing) -> tuple[torch.Tensor, _Nothing]:
        return logits_V.expand(len(token_N), 3), state

    best = []
    for penalty in (0.0, 0.6, 8.0):
        ((first, *_),) = search(step, _Nothing(), torch.tensor([0]), BeamSpec(27, 3, penalty), end_tokens=[0])
        best.append(first.tokens)
    assert best == [(), (), (1, 1)]
    assert length_penalty(1, 0.6) == 1.0


def test_unusable_requests_are_refused() -> None:
    """An empty prompt, a beam of none, a negative penalty and logits of NaN are refused in words."""
    model = _model()
    with pytest.raises(InputError, match="no tokens"):
        beam_search(model, [[1], []], BeamSpec())
    with pytest.raises(InputError, match="width 0"):
        BeamSpec(width=0)
    with pytest.raises(InputError, match="length penalty -1"):
        BeamSpec(penalty=-1)
    with torch.no_grad():
        model.norm.weight.fill_(float("nan"))
    with pytest.raises(EngineError, match="NaN"):
        beam_search(model, [[1]], BeamSpec())
