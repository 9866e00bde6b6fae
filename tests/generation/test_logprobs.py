"""Log-probabilities of drawn tokens: the model's own, sorted, and the same beside other sessions."""

import math

import pytest
import torch

from dist_attn.generation import token_logprobs
from dist_attn.rank.decode_slots import DecodeSlots
from dist_attn.wire.messages import SamplingSpec
from dist_attn.wire.rank_messages import DecodeEntry
from tests.support.models import small_model


def test_they_are_the_log_softmax() -> None:
    """The drawn token's value and the likeliest ones in falling order, the lower id first among equals."""
    told = token_logprobs(torch.tensor([0.0, 2.0, 2.0, -math.inf]), 0, 3)
    assert told is not None
    total = math.log(1 + 2 * math.exp(2))
    assert told.drawn == pytest.approx(-total)
    assert told.top_tokens == [1, 2, 0]
    assert told.top_logprobs == pytest.approx([2 - total, 2 - total, -total])
    assert token_logprobs(torch.tensor([0.0, -math.inf]), 1, 0).drawn == -math.inf  # type: ignore[union-attr]


def test_none_are_given_unless_asked_for() -> None:
    """None asks for none; 0 asks for the drawn token's own alone; more than there are tokens gives all."""
    logits_V = torch.zeros(4)
    assert token_logprobs(logits_V, 2, None) is None
    own = token_logprobs(logits_V, 2, 0)
    assert own is not None and own.top_tokens == [] and own.drawn == pytest.approx(-math.log(4))
    every = token_logprobs(logits_V, 2, 100)
    assert every is not None and every.top_tokens == [0, 1, 2, 3]


def test_sessions_side_by_side_have_their_own() -> None:
    """In one batch each session gets what it asked for, and a greedy draw is the likeliest token."""
    model = small_model()
    slots = DecodeSlots(model)
    asked = {1: None, 2: 0, 3: 5}
    with torch.inference_mode():
        for session, count in asked.items():
            spec = SamplingSpec(max_tokens=4, temperature=0.0, top_k=1, logprobs=count)
            slots.take_in(session, model.initial_state(1), spec)
        drawn = {d.request: d for d in slots.draw([DecodeEntry(session, 65) for session in asked])}
    assert drawn[1].logprobs is None
    assert drawn[2].logprobs.top_tokens == []
    best = drawn[3].logprobs
    assert best.top_tokens[0] == drawn[3].token == drawn[1].token
    assert best.drawn == best.top_logprobs[0] == max(best.top_logprobs) < 0
    assert sum(math.exp(value) for value in best.top_logprobs) < 1
