"""Generating from a small model: the blocks, the state and the full forward pass tell the same story."""

from functools import cache

import numpy as np
import pytest
import torch

from dist_attn.errors import EngineError, InputError, TokenError
from dist_attn.generation import generate
from dist_attn.generation.decode import prefill
from dist_attn.model_config.figures import GRAIN
from dist_attn.model_config.mixers.kernels import RandomFeatureConfig
from dist_attn.models import LanguageModel, LanguageModelConfig, build_model
from dist_attn.wire.messages import SamplingSpec

VOCAB = 50


@cache
def small_model() -> LanguageModel:
    """A gated model of two layers with random weights, large enough that its logits differ clearly."""
    mixer = RandomFeatureConfig(kind="rfa_gate", hidden_size=16, num_heads=2, num_random=8)
    config = LanguageModelConfig(vocab_size=VOCAB, hidden_size=16, num_layers=2, mlp_size=32, mixer=mixer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = build_model(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def prompt(length: int) -> list[int]:
    """Some tokens, the same ones every time."""
    return [(7 * i * i + 3) % VOCAB for i in range(length)]


def greedy(max_tokens: int) -> SamplingSpec:
    """The likeliest tokens."""
    return SamplingSpec(max_tokens=max_tokens, temperature=0.0)


@pytest.mark.parametrize("length", [1, 2, 30, GRAIN + 1, 2 * GRAIN + 6])
def test_as_the_full_forward_pass(length: int) -> None:
    """Each greedy token is the likeliest one after all tokens before it, fed at once without a state."""
    model = small_model()
    drawn = generate(model, prompt(length), greedy(6))
    assert len(drawn) == 6
    tokens = torch.tensor([prompt(length) + drawn])
    with torch.no_grad():
        logits_LV = model.logits(tokens)[0, length - 1 : -1]
    # The other order of sums may swap two tokens that are equally likely but for rounding, so logits are compared.
    chosen = logits_LV.gather(1, torch.tensor(drawn)[:, None])[:, 0]
    assert (logits_LV.amax(dim=1) - chosen).max() < 1e-3


def test_prefill_blocks() -> None:
    """The state after blocks is the state after single steps."""
    model, tokens = small_model(), prompt(GRAIN + 3)
    with torch.no_grad():
        state = prefill(model, torch.tensor(tokens))
        stepped = model.initial_state(1)
        for token in tokens:
            expected_BV, stepped = model.step(torch.tensor([token]), stepped)
        got_BV, _ = model.step(torch.tensor([1]), state)
        expected_BV, _ = model.step(torch.tensor([1]), stepped)
    assert state.position == len(tokens)
    torch.testing.assert_close(got_BV, expected_BV, rtol=1e-3, atol=1e-3)
    assert prefill(model, torch.tensor([], dtype=torch.int64), state) is state


def test_streamed_and_seeded() -> None:
    """Every token is handed over as it is drawn, and a seed draws the same tokens again."""
    seen: list[int] = []
    spec = SamplingSpec(max_tokens=20, seed=7)
    drawn = generate(small_model(), np.array(prompt(9), dtype=np.int32), spec, on_token=seen.append)
    assert seen == drawn == generate(small_model(), prompt(9), spec)
    assert drawn != generate(small_model(), prompt(9), SamplingSpec(max_tokens=20, seed=8))


def test_end_token() -> None:
    """Drawing any of the end tokens ends the text; it is neither returned nor handed over."""
    spec = SamplingSpec(max_tokens=20, seed=7)
    whole = generate(small_model(), prompt(9), spec)
    end = whole[5]
    seen: list[int] = []
    drawn = generate(small_model(), prompt(9), spec, end_tokens=[whole[9], end], on_token=seen.append)
    assert seen == drawn == whole[: min(whole.index(end), whole.index(whole[9]))]
    past = generate(small_model(), prompt(9), SamplingSpec(max_tokens=20, seed=7, ignore_eos=True), end_tokens=[end])
    assert past == whole
    least = SamplingSpec(max_tokens=20, seed=7, min_tokens=12)
    put_off = generate(small_model(), prompt(9), least, end_tokens=[end])
    assert end not in put_off[:12] and len(put_off) >= 12


def test_refused() -> None:
    """An empty prompt, unknown ids and an unusable specification are refused before or as they are fed."""
    model = small_model()
    with pytest.raises(InputError, match="no tokens"):
        generate(model, [], greedy(1))
    with pytest.raises(TokenError, match=f"0 to {VOCAB - 1}"):
        generate(model, [VOCAB, 1], greedy(1))
    with pytest.raises(InputError, match="min_tokens is 2; it must be from 0 to max_tokens"):
        generate(model, [1], SamplingSpec(max_tokens=1, min_tokens=2))
    with pytest.raises(InputError, match="top_p"):
        generate(model, [1], SamplingSpec(max_tokens=1, top_p=0.0))


def test_broken_weights() -> None:
    """A model with NaN in its weights ends in an EngineError, not in a made-up token."""
    model = build_model(small_model().config).eval()
    with torch.no_grad():
        model.embedding.weight.fill_(float("nan"))
    with pytest.raises(EngineError, match="NaN"):
        generate(model, [1, 2], greedy(1))
