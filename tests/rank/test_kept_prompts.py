"""Completions of a real model that begin with a stored state: every bit is that of reading everything."""

import numpy as np
import pytest

from dist_attn.generation import generate
from dist_attn.wire.messages import SamplingSpec
from tests.control.test_kept_prompts import Reader
from tests.rank.test_sessions_through_losses import OneRank
from tests.rank.test_stored_sessions import CHUNK, WITHOUT_END
from tests.support.models import small_config, small_model
from tests.support.simulated_engine import run_through_losses, run_to_the_end

PROMPT = np.random.default_rng(8).integers(0, 250, 4 * CHUNK + 70).astype("<i4")
GREEDY = SamplingSpec(9, temperature=0.0, logprobs=2, logit_bias=WITHOUT_END)
DRAWN = SamplingSpec(9, temperature=0.9, seed=4, logprobs=2, frequency_penalty=0.5, logit_bias=WITHOUT_END)


def run(reader, seed=None):
    """The completion when it has ended, undisturbed or through losses of its rank."""
    run_to_the_end(reader.engine, [reader]) if seed is None else run_through_losses(reader, seed)
    assert reader.failed is None, reader.failed
    return reader


@pytest.fixture(scope="module")
def engine():
    """One engine for the tests that lose no rank."""
    return OneRank()


@pytest.fixture(scope="module")
def states(engine):
    """The states of the prompt, as a completion hands them out."""
    positions = tuple(range(CHUNK, len(PROMPT), CHUNK))
    return run(Reader(engine, "first", PROMPT, states_at=positions, spec=GREEDY).open()).states


@pytest.mark.parametrize("spec", [GREEDY, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("begin", [CHUNK, 4 * CHUNK])
def test_the_same_tokens_with_the_same_probabilities(engine, states, begin, spec):
    """From any state on, greedy or drawn with penalties: the tokens and log-probabilities of reading it all anew."""
    whole = run(Reader(engine, f"whole {begin} {spec.seed}", PROMPT, spec=spec).open())
    rest = run(Reader(engine, f"rest {begin} {spec.seed}", PROMPT, begin, spec=spec, stored=states[begin]).open())
    assert rest.restored and not whole.restored
    assert rest.drawn == whole.drawn and len(rest.drawn) == 9
    assert rest.told == whole.told and len(rest.told) == 9
    if spec is GREEDY:
        assert whole.drawn == generate(small_model(small_config("rfa_gate")), PROMPT, spec)


def test_states_are_the_same_whether_or_not_the_prompt_began_with_one(engine, states):
    """What goes on from a state hands out, bit for bit, the states that the whole prompt gives."""
    reader = Reader(
        engine, "again", PROMPT, 2 * CHUNK, states_at=(3 * CHUNK, 4 * CHUNK), spec=GREEDY, stored=states[2 * CHUNK]
    )
    later = run(reader.open()).states
    assert later == {position: states[position] for position in (3 * CHUNK, 4 * CHUNK)}


@pytest.mark.parametrize("seed", range(3))
def test_losses_change_no_bit(engine, states, seed):
    """With the rank lost again and again, tokens, log-probabilities and states stay those of an undisturbed run."""
    whole = run(Reader(engine, f"undisturbed {seed}", PROMPT, spec=DRAWN).open())
    fresh = OneRank()
    at = (3 * CHUNK, 4 * CHUNK)
    reader = run(Reader(fresh, "a", PROMPT, CHUNK, states_at=at, spec=DRAWN, stored=states[CHUNK]).open(), seed)
    assert (reader.drawn, reader.told) == (whole.drawn, whole.told)
    assert all(states[position] == data for position, data in reader.states.items())
