"""Stored sessions at the controller: states in, tokens, draws, states out; ranks are lost meanwhile, bits stay."""

import random
from dataclasses import dataclass

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_attn.wire.messages import Cancel, FinishDrawing, Generated, Rows, RowSpec, Tokens
from dist_attn.wire.rank_messages import PrefillOp
from dist_attn.wire.specs import LONGEST_TEXT
from tests.control.test_replay import check, open_all
from tests.support.examples import examples
from tests.support.fake_rank import END, drawn_after, fake_hidden, fake_snapshot
from tests.support.opening import open_session
from tests.support.simulated_engine import (
    GRID,
    MANIFEST,
    Asker,
    Engine,
    disturb,
    nothing_is_left,
    run_to_the_end,
)


@dataclass
class Client(Asker):
    """The API's side of one session."""

    every: int = 0
    rows: RowSpec | None = None

    def opening(self, begin, sampling):
        """The message that opens it."""
        return open_session(self.name, begin, self.rows, sampling, self.every)

    @property
    def ended(self):
        """Whether nothing more will come."""
        return self.done is not None or self.failed is not None

    def check(self):
        """All came once, as an undisturbed run gives it."""
        assert self.failed is None, self.failed
        last = int(self.tokens[-1]) if len(self.tokens) else self.last
        wanted = drawn_after(last, self.draws)
        if self.finish is None:
            assert self.drawn == wanted
        else:
            # A reader that is late may find that a state after more draws is the last one saved: then it ends there.
            assert self.done.drawn >= min(self.finish, len(wanted))
            assert self.drawn[: self.done.drawn] == wanted[: self.done.drawn]
            wanted = wanted[: self.done.drawn]
        fed = [*self.tokens.tolist(), *wanted]
        end = self.begin + len(fed)
        every = -(-self.every // GRID) * GRID
        positions = {p for p in range(self.begin + 1, end + 1) if every and p % every == 0} | {end}
        assert list(self.states) == sorted(positions)
        for position, data in self.states.items():
            at = position - self.begin
            assert data == fake_snapshot(position, fed[at - 1] if at else self.last, MANIFEST)
        assert len(self.restored) == bool(self.begin)
        assert (self.done.position, self.done.drawn) == (end, len(wanted))
        if self.rows is not None and len(self.tokens):
            self._check_rows()

    def _check_rows(self):
        starts, vectors = self.engine.rows(self.name)
        stop = self.begin + len(self.tokens)
        edges = [self.begin, *range((self.begin // self.rows.window + 1) * self.rows.window, stop, self.rows.window)]
        assert starts == edges and self.done.rows == len(edges)
        hidden = fake_hidden(self.tokens, self.begin).astype(np.float64)
        ranges = zip(edges, [*edges[1:], stop], strict=True)
        parts = [hidden[a - self.begin : b - self.begin].mean(0) for a, b in ranges]
        assert np.array_equal(vectors, np.array(parts, dtype=np.float32))


SESSION = st.tuples(
    st.sampled_from([0, 1, 700, 1024, 3000]),  # where it begins
    st.sampled_from([0, 1, 300, 1024, 2500, 5000]),  # tokens
    st.sampled_from([0, 1, 3, 20]),  # draws
    st.sampled_from([0, 1024, 1100]),  # states handed out
    st.booleans(),  # rows
    st.sampled_from([None, 0, 2, 9]),  # where its reader has enough
)


@given(st.lists(SESSION, min_size=1, max_size=3), st.booleans(), st.integers(0, 1 << 32))
@examples(30)
def test_ranks_may_be_lost_at_any_moment(sessions, beside, seed):
    """Kills between any two messages change no state, no row and no token that is handed out, and none comes twice."""
    chance = random.Random(seed)
    engine = Engine()
    clients = []
    for n, (begin, length, draws, every, rows, finish) in enumerate(sessions):
        if not (begin or length):
            length = 5
        tokens = (np.arange(length) * 13 + n) % 900
        rows = RowSpec("window", 300) if rows else None
        finish = finish if draws == 20 else None
        clients.append(Client(engine, f"s{n}", tokens, begin, draws, every=every, rows=rows, finish=finish).open())
    texts, prompts = ({"t": (np.arange(3000) % 900, 300)}, {"p": (np.arange(600), 9)}) if beside else ({}, {})
    open_all(engine, texts, prompts)
    disturb(engine, chance, 150, clients)
    run_to_the_end(engine, clients)
    engine.to_the_end([*texts, *prompts])
    for client in clients:
        client.check()
    check(engine, texts, prompts)
    nothing_is_left(engine)


def test_the_end_token_is_no_part_of_the_session():
    """Drawing stops before it, the state stands before it, and the reason says so."""
    engine = Engine()
    before = next(token for token in range(900) if drawn_after(token, 9) == [])
    client = Client(engine, "s", np.array([before]), 700, 9).open()
    run_to_the_end(engine, [client])
    client.check()
    assert [m for m in engine.of("s") if isinstance(m, Generated)] == [Generated("s", [], "stop")]
    assert client.done.position == 701 and END not in client.drawn
    nothing_is_left(engine)


def test_a_reader_may_have_enough_while_a_loss_is_made_good():
    """Draws that were sent before the loss and are not made again yet are taken back as well."""
    engine = Engine()
    client = Client(engine, "s", np.arange(300), draws=20, rows=RowSpec("window", 300)).open()
    while len(client.drawn) < 5:
        client.listen()
        engine.turn()
        engine.work_off()
    client.listen()
    engine.kill(0)
    engine.api(FinishDrawing("s", 2))
    client.finish = 2
    run_to_the_end(engine, [client])
    client.check()
    nothing_is_left(engine)


@pytest.mark.parametrize("enough", [0, 1, 4, 9])
def test_a_reader_that_has_enough_gets_the_state_after_that(enough):
    """Tokens that were drawn beyond are taken back: the state is the one that fewer draws would have left."""
    engine = Engine()
    client = Client(engine, "s", np.arange(40), 700, 30, finish=enough).open()
    run_to_the_end(engine, [client])
    client.check()
    assert client.done.drawn == enough and len(client.drawn) >= enough + 2
    nothing_is_left(engine)


def test_nothing_to_do_gives_the_state_back():
    """A session that is neither read on nor drawn from stands where it stood, with the same bytes."""
    engine = Engine()
    client = Client(engine, "s", np.array([], dtype=int), 700).open()
    run_to_the_end(engine, [client])
    client.check()
    assert client.states[700] == client.stored


def test_what_a_restore_comes_to_is_told():
    """A state of another number of ranks goes on, and the answer says what may differ, with both values."""
    engine = Engine()
    computed = msgspec.structs.replace(MANIFEST.computed, ranks=1)
    client = Client(engine, "s", np.arange(5), 700)
    client.stored = fake_snapshot(700, 3, msgspec.structs.replace(MANIFEST, computed=computed))
    client.open()
    run_to_the_end(engine, [client])
    (restored,) = client.restored
    report = restored.report
    assert (report.restored_position, report.recomputed_tokens, report.bit_exact) == (700, 0, False)
    assert report.reason == "ranks was 1 and is 2"


def spoilt(kind):
    """A state that cannot be gone on from."""
    good = fake_snapshot(700, 3, MANIFEST)
    match kind:
        case "damaged":
            return good[:-1] + bytes([good[-1] ^ 1])
        case "other weights":
            model = msgspec.structs.replace(MANIFEST.model, weights="00" * 32)
            return fake_snapshot(700, 3, msgspec.structs.replace(MANIFEST, model=model))
        case "other place":
            return fake_snapshot(701, 3, MANIFEST)
        case "arrays of another shape":
            return fake_snapshot(700, 100_000, MANIFEST)
        case "cut off":
            return good[:-3]
    return good + bytes(10_000_000)


@pytest.mark.parametrize(
    ("kind", "code", "words"),
    [
        ("damaged", "invalid_state", "is damaged"),
        ("other weights", "state_mismatch", f"weights is {'00' * 32}, that of the model here is {'ab' * 32}"),
        ("other place", "invalid_state", "stands at 701, and 700 was announced"),
        ("arrays of another shape", "invalid_state", "another shape"),
        ("cut off", "invalid_state", "3 of its bytes are missing"),
        ("too large", "invalid_state", "one of this model has up to"),
    ],
)
def test_a_state_that_is_none_fails_its_request_alone(kind, code, words):
    """What is wrong is said, no rank is lost by it, and others go on."""
    engine = Engine()
    client = Client(engine, "s", np.arange(3000) % 900, 700, draws=3)
    client.stored = spoilt(kind)
    client.open()
    other = Client(engine, "other", np.arange(3000) % 900, 700, draws=3).open()
    run_to_the_end(engine, [client, other])
    assert client.failed.code == code and words in client.failed.message
    other.check()
    assert engine.controller.status(engine.now).lost_groups == 0
    nothing_is_left(engine)


@pytest.mark.parametrize(("left", "tokens", "draws"), [(3, 3, 0), (3, 1, 2), (0, 0, 0)])
def test_a_text_may_reach_the_last_position(left, tokens, draws):
    """Up to it states are handed out and drawn from as anywhere else."""
    engine = Engine()
    client = Client(engine, "s", np.arange(tokens), LONGEST_TEXT - left, draws=draws).open()
    run_to_the_end(engine, [client])
    client.check()


@pytest.mark.parametrize(("left", "tokens", "draws"), [(3, 4, 0), (3, 1, 3), (0, 1, 0), (0, 0, 1)])
def test_no_text_goes_beyond_the_last_position(left, tokens, draws):
    """It is refused with both numbers before anything of it is read or drawn, and no rank is lost by it."""
    engine = Engine()
    client = Client(engine, "s", np.arange(tokens), LONGEST_TEXT - left, draws=draws).open()
    other = Client(engine, "other", np.arange(3000) % 900, 700, draws=3).open()
    run_to_the_end(engine, [client, other])
    assert client.failed.code == "context_length_exceeded" and not client.drawn
    assert f"has {LONGEST_TEXT + 1} tokens, and a text may have {LONGEST_TEXT}" in client.failed.message
    other.check()
    assert engine.controller.status(engine.now).lost_groups == 0
    nothing_is_left(engine)


def test_a_state_that_is_not_there_as_it_was_stored_ends_its_request():
    """Bytes that are gone, or others than the digest says, are told as damage, and nothing is left behind."""
    for blobs in ({}, {"0" * 41 + "1": b"other bytes"}):
        engine = Engine()
        client = Client(engine, "s", np.arange(20), 700).open()
        engine.states.blobs = blobs
        run_to_the_end(engine, [client])
        assert client.failed.code == "state_damaged" and "the state at 700 is damaged" in client.failed.message
        nothing_is_left(engine)


@pytest.mark.parametrize("error", [ValueError("no such member"), MemoryError()])
def test_an_error_that_nobody_foresaw_ends_its_request_alone(monkeypatch, error):
    """Whatever comes of reading a state, the engine goes on with the others."""
    engine = Engine()
    client = Client(engine, "s", np.arange(20), 700).open()
    with monkeypatch.context() as patched:
        patched.setattr(engine.states, "fetch", lambda number, begin, most, then: then(error))
        run_to_the_end(engine, [client])
    other = Client(engine, "other", np.arange(3000) % 900, 700, draws=3).open()
    run_to_the_end(engine, [other])
    assert client.failed.code == "engine_failed" and type(error).__name__ in client.failed.message
    other.check()
    nothing_is_left(engine)


def test_a_session_whose_store_is_slow_rests(monkeypatch):
    """Not more states wait to be stored than a few; the session goes on with the store, and they come in order."""
    engine = Engine()
    client = Client(engine, "s", np.arange(60_000) % 900, every=1024).open()
    with monkeypatch.context() as patched:
        patched.setattr(engine.states, "take_results", lambda: None)
        for _ in range(40):
            client.listen()
            engine.turn()
            engine.work_off()
    assert 2 < len(engine.states.held) <= 12 and not client.states
    run_to_the_end(engine, [client])
    client.check()
    nothing_is_left(engine)


def test_a_state_that_cannot_be_stored_is_told_and_the_session_goes_on():
    """It is for the API to say what a state is worth: the text is read to its end, and later states are tried."""
    engine = Engine()
    engine.states.full = True
    client = Client(engine, "s", np.arange(2500) % 900, every=1024).open()
    run_to_the_end(engine, [client])
    assert client.failed is None and not client.states
    assert [state.position for state in client.unstored] == [1024, 2048, 2500]
    nothing_is_left(engine)


@pytest.mark.parametrize("stored", [True, False])
def test_a_state_of_a_request_that_has_ended_leaves_nothing_in_the_store(stored):
    """Who cancels is told of no state, and a blob that was written meanwhile is deleted."""
    engine = Engine()
    engine.states.full = not stored
    client = Client(engine, "s", np.arange(2000) % 900, every=1024).open()
    while not engine.states.held:
        client.listen()
        engine.turn()
        engine.work_off()
    assert len(engine.states.blobs) == stored  # it is written, and that was not heard of yet
    engine.api(Cancel("s"))
    nothing_is_left(engine)
    assert not engine.states.blobs


def test_a_session_without_anything_is_refused():
    """From the empty state there must be a token."""
    engine = Engine()
    client = Client(engine, "s", np.array([], dtype=int), draws=3).open()
    client.listen()
    assert client.failed.code == "empty_input"


def test_an_append_in_messages_of_any_size_is_cut_into_the_same_blocks():
    """However slowly tokens come, blocks end on the grid, so the state has the same bits."""
    engine, cuts = Engine(), []
    engine.api(open_session("s", None, None, None, 1024))
    engine.turn()
    engine.turn()
    tokens, sent = np.arange(2500) % 900, 0
    while sent < len(tokens):
        stop = min(len(tokens), sent + 350)
        engine.api(Tokens("s", sent, tokens[sent:stop].astype("<i4").tobytes(), stop == len(tokens)))
        sent = stop
        for _ in range(4):
            engine.turn()
            ops = [op for message in engine.inboxes.get(0, []) for op in getattr(message, "ops", [])]
            cuts += [op.start for op in ops if isinstance(op, PrefillOp)]
            engine.work_off()
    assert cuts == [0, 1024, 2048]


def test_rows_of_a_session_come_with_its_states():
    """Vectors of what is fed, by windows that count from the beginning of the session."""
    engine = Engine()
    client = Client(engine, "s", np.arange(2000) % 900, 700, every=1024, rows=RowSpec("window", 300)).open()
    run_to_the_end(engine, [client])
    client.check()
    assert any(isinstance(m, Rows) for m in engine.of("s"))
