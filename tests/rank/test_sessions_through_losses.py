"""Stored sessions on a real model behind a real controller: losses and fresh engines change no bit of any state."""

import numpy as np
import pytest

from dist_attn.ops.decode_step import has_decode_step
from tests.control.test_sessions import Client
from tests.rank.test_stored_sessions import CHUNK, executor
from tests.support import simulated_engine
from tests.support.models import small_config, small_model
from tests.support.simulated_engine import Engine, run_through_losses, run_to_the_end

SETTINGS = simulated_engine.SETTINGS.replace(ranks=1, chunk_tokens=CHUNK)
TOKENS = np.random.default_rng(4).integers(0, 250, 2100).astype("<i4")
DRAWS = 11


class OneRank(Engine):
    """A controller and one rank with a real model, in one thread; each epoch has a model of its own."""

    pauses = 0

    def __init__(self, kind="rfa_gate"):
        self.kind = kind
        super().__init__(SETTINGS)

    def make_rank(self, epoch, rank):
        """The same model each time."""
        if self.kind != "llama":
            return executor(model=small_model(small_config(self.kind)))
        from dist_attn.adapters.model import AdaptedModel
        from tests.support.downloaded import llama

        model = AdaptedModel(llama(128, vocab_size=257, initializer_range=0.2))
        assert (model._fused is not None) == has_decode_step()
        return executor(model=model)


def run(client, seed=None):
    """What it is handed and draws, of a run that is not disturbed or that loses its rank."""
    run_to_the_end(client.engine, [client]) if seed is None else run_through_losses(client, seed)
    assert client.failed is None, client.failed
    return client.states, client.drawn


@pytest.fixture(scope="module", params=["rfa_gate", "hybrid", "llama"])
def kind(request):
    """With states of one size, with keys of all tokens in them, and whose steps are one call."""
    if request.param == "llama":
        pytest.importorskip("transformers", reason="pip install -e '.[hf]'")
    return request.param


@pytest.fixture(scope="module")
def undisturbed(kind):
    """States by position and drawn tokens of a run without any interruption."""
    return run(Client(OneRank(kind), "s", TOKENS, draws=DRAWS, every=512).open())


@pytest.mark.parametrize("seed", range(4))
def test_a_lost_rank_changes_no_bit(undisturbed, kind, seed):
    """Every state that is handed out, logits included, and every drawn token are those of the undisturbed run."""
    assert list(undisturbed[0]) == [512, 1024, 1536, 2048, 2100 + len(undisturbed[1])]
    assert run(Client(OneRank(kind), "s", TOKENS, draws=DRAWS, every=512).open(), seed) == undisturbed


@pytest.mark.parametrize("at", [512, 2048])
def test_a_fresh_engine_goes_on_bit_for_bit(undisturbed, kind, at):
    """From a state that was handed out nothing is read again, and all that follows has the bits of the one engine."""
    states, drawn = undisturbed
    client = Client(OneRank(kind), "s", TOKENS[at:], at, draws=DRAWS, every=512)
    client.stored = states[at]
    later = {position: state for position, state in states.items() if position > at}
    assert run(client.open()) == (later, drawn)
    report = client.restored[0].report
    assert (report.restored_position, report.recomputed_tokens, report.bit_exact) == (at, 0, True)


def test_drawing_needs_no_token(undisturbed, kind):
    """The first token of a generation comes from the logits that the state was stored with."""
    whole = Client(OneRank(kind), "s", TOKENS[:1024], every=512).open()
    states, _ = run(whole)
    client = Client(OneRank(kind), "s", TOKENS[:0], 1024, draws=DRAWS)
    client.stored = states[1024]
    at_once = Client(OneRank(kind), "s", TOKENS[:1024], draws=DRAWS).open()
    (end, state), drawn = [*run(at_once)[0].items()][-1], at_once.drawn
    assert run(client.open()) == ({end: state}, drawn)
    assert states[1024] == undisturbed[0][1024]
