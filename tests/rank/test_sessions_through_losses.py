"""Stored sessions on a real model behind a real controller: losses and fresh engines change no bit of any state."""

import random

import numpy as np
import pytest

from dist_attn.control.settings import ControlSettings
from dist_attn.rank.worker import ReceivedStates, perform
from dist_attn.rank_link.heartbeat import Pulse
from dist_attn.wire.messages import PROTOCOL_VERSION
from dist_attn.wire.rank_messages import RankHello, StatePart
from dist_attn.wire.snapshot import largest_snapshot
from tests.control.test_replay import Engine
from tests.control.test_sessions import Client
from tests.rank.test_stored_sessions import CHUNK, executor
from tests.support.models import small_config, small_model

SETTINGS = ControlSettings(
    api_address="ipc:///none",
    model="m",
    chunk_tokens=CHUNK,
    save_tokens=512,
    save_draws=3,
    crashes_to_open=1000,
    stall_limit_s=1e6,  # time passes in leaps here, and nobody sends heartbeats
    heartbeat_deadline_s=1e6,
)
TOKENS = np.random.default_rng(4).integers(0, 250, 2100).astype("<i4")
DRAWS = 11


class OneRank(Engine):
    """A controller and one rank with a real model, in one thread; each epoch has a model of its own."""

    def __init__(self):
        super().__init__(SETTINGS)

    def _start(self, epoch):
        super()._start(epoch)
        made = executor(model=small_model(small_config("rfa_gate")))
        self.ranks = {0: made}
        self.coming = {0: ReceivedStates(largest_snapshot(made.state_bytes, made.vocab_size))}

    def hello_of(self, rank):
        """What the rank says first."""
        made = self.ranks[rank]
        sizes = (made.hidden_size, made.vocab_size, made.end_token, None, made.state_bytes, made.manifest)
        return RankHello(PROTOCOL_VERSION, self.epoch, rank, 1, 70, "h", "m", *sizes)

    def work(self, rank, heard=1000):
        """The rank takes what it was sent first; false when there is nothing."""
        if rank not in self.ranks or not self.inboxes[rank]:
            return False
        message = self.inboxes[rank].pop(0)
        if isinstance(message, StatePart):
            self.coming[rank].add(message)
            return True
        done = perform(message, rank, self.ranks[rank], Pulse(), self.coming[rank], self.outboxes[rank].append)
        self.outboxes[rank].append(done)
        return self._hear(rank, heard)


def run(client, seed=None):
    """Work on until the session has ended, and lose the rank thrice at moments that the seed chooses."""
    engine, chance, kills = client.engine, random.Random(seed), 0 if seed is None else 3
    for _ in range(3000):
        client.listen()
        if client.done is not None or client.failed is not None:
            break
        engine.turn()
        if not kills:
            while engine.work(0):
                pass
        elif chance.random() < 0.2:
            kills -= 1
            engine.kill(0)
        else:
            engine.work(0)
    assert client.failed is None and client.done is not None, client.failed
    return client.states, client.drawn


@pytest.fixture(scope="module")
def undisturbed():
    """States by position and drawn tokens of a run without any interruption."""
    return run(Client(OneRank(), "s", TOKENS, draws=DRAWS, every=512).open())


@pytest.mark.parametrize("seed", range(4))
def test_a_lost_rank_changes_no_bit(undisturbed, seed):
    """Every state that is handed out, logits included, and every drawn token are those of the undisturbed run."""
    assert list(undisturbed[0]) == [512, 1024, 1536, 2048, 2100 + len(undisturbed[1])]
    assert run(Client(OneRank(), "s", TOKENS, draws=DRAWS, every=512).open(), seed) == undisturbed


@pytest.mark.parametrize("at", [512, 2048])
def test_a_fresh_engine_goes_on_bit_for_bit(undisturbed, at):
    """From a state that was handed out nothing is read again, and all that follows has the bits of the one engine."""
    states, drawn = undisturbed
    client = Client(OneRank(), "s", TOKENS[at:], at, draws=DRAWS, every=512)
    client.stored = states[at]
    later = {position: state for position, state in states.items() if position > at}
    assert run(client.open()) == (later, drawn)
    report = client.restored[0].report
    assert (report.restored_position, report.recomputed_tokens, report.bit_exact) == (at, 0, True)


def test_drawing_needs_no_token(undisturbed):
    """The first token of a generation comes from the logits that the state was stored with."""
    whole = Client(OneRank(), "s", TOKENS[:1024], every=512).open()
    states, _ = run(whole)
    client = Client(OneRank(), "s", TOKENS[:0], 1024, draws=DRAWS)
    client.stored = states[1024]
    at_once = Client(OneRank(), "s", TOKENS[:1024], draws=DRAWS).open()
    (end, state), drawn = [*run(at_once)[0].items()][-1], at_once.drawn
    assert run(client.open()) == ({end: state}, drawn)
    assert states[1024] == undisturbed[0][1024]
