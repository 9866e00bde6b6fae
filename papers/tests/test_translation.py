"""Translations of sources of different lengths: each is what a naive search finds for it alone, in the order given."""

import pytest
import torch

from dist_attn.errors import InputError
from dist_attn_papers.translation.beam_search import BeamSpec, length_penalty, translate
from dist_attn_papers.translation.config import EncoderDecoderConfig
from dist_attn_papers.translation.model import EncoderDecoder
from tests.support.over_ranks import randomised

END = 1
SOURCES = [[3, 4, END], [5, END], [2, 2, END], [6, 5, 4, 3, END], [4, END]]


def _model(**changes: int) -> EncoderDecoder:
    heads = {"hidden_size": 8, "num_heads": 2}
    mixer = {"kind": "bidirectional", "attention": "softmax", **heads}
    encoder = {"hidden_size": 8, "num_layers": 1, "mlp_size": 12, "mixer": mixer}
    decoder = {
        "num_layers": 1,
        "mlp_size": 12,
        "mixer": {"kind": "rfa_gate", **heads, "num_random": 6},
        "cross": {"attention": "rfa", **heads, "num_random": 6},
    }
    values = {"vocab_size": 7, "encoder": encoder, "decoder": decoder, **changes}
    return randomised(EncoderDecoder(EncoderDecoderConfig.model_validate(values)), seed=11)


@torch.no_grad()
def _greedy(model: EncoderDecoder, source: list[int], longest: int) -> tuple[int, ...]:
    """The likeliest token again and again, by a whole pass over source and target for each."""
    target = [END]
    while len(target) <= longest:
        target.append(int(model(torch.tensor([source]), torch.tensor([target]))[0, -1].argmax()))
        if target[-1] == END:
            return tuple(target[1:-1])
    return tuple(target[1:])


def test_width_1_is_the_greedy_choice_for_each_source():
    """Sources of several lengths, side by side or not, get the tokens that whole passes choose one by one."""
    model = _model()
    found = translate(model, SOURCES, BeamSpec(width=1, max_tokens=6), end_token=END)
    assert [hypotheses[0].tokens for hypotheses in found] == [_greedy(model, source, 6) for source in SOURCES]
    assert len({hypotheses[0].tokens for hypotheses in found}) > 1


def test_a_wider_search_finds_nothing_worse():
    """Scores of wider beams are penalised log-probabilities of whole passes, the best first, and no worse."""
    model = _model()
    narrow, wide = (translate(model, SOURCES, BeamSpec(width, 4, 0.6), end_token=END) for width in (1, 49))
    for source, one, many in zip(SOURCES, narrow, wide, strict=True):
        assert many[0].score >= one[0].score - 1e-12
        best = many[0]
        tokens = [*best.tokens, END] if best.ended else list(best.tokens)
        with torch.no_grad():
            logprobs = model(torch.tensor([source]), torch.tensor([[END, *tokens]]))[0, :-1].log_softmax(-1)
        total = float(logprobs.gather(1, torch.tensor(tokens)[:, None]).sum())
        assert best.score == pytest.approx(total / length_penalty(len(tokens), 0.6), abs=1e-9)


def test_sources_may_have_a_vocabulary_of_their_own():
    """With a source vocabulary, ids that no target has are read, and targets stay in theirs."""
    model = _model(source_vocab_size=20)
    assert model.source_embedding is not None
    (found,) = translate(model, [[19, 12, 0]], BeamSpec(width=2, max_tokens=5), end_token=END)
    assert all(token < 7 for hypothesis in found for token in hypothesis.tokens)


def test_a_source_without_tokens_is_named():
    """An empty source is refused with its place."""
    with pytest.raises(InputError, match="source 1 has no tokens"):
        translate(_model(), [[3, END], []], BeamSpec(), end_token=END)
