"""Completions that begin with a stored state, and that hand out states of their prompts, through losses too."""

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_attn.wire.messages import SamplingSpec
from dist_attn.wire.rank_messages import PrefillOp
from tests.control.test_replay import open_all
from tests.support.examples import examples
from tests.support.fake_rank import drawn_after, fake_manifest, fake_snapshot
from tests.support.opening import open_completion
from tests.support.simulated_engine import (
    GRID,
    MANIFEST,
    RANKS,
    Asker,
    Engine,
    disturb,
    nothing_is_left,
    run_to_the_end,
)


@dataclass
class Reader(Asker):
    """The API's side of one completion; what it is given are all tokens of its prompt."""

    draws: int = 3
    states_at: tuple[int, ...] = ()
    spec: SamplingSpec | None = None
    prompt: np.ndarray = field(init=False)

    def __post_init__(self):
        self.prompt, self.tokens = self.tokens, self.tokens[self.begin :]
        self.last = int(self.prompt[self.begin - 1])

    def opening(self, begin, sampling):
        """The message that opens it."""
        return open_completion(self.name, self.spec or sampling, begin=begin, states_at=self.states_at)

    @property
    def ended(self):
        """Whether nothing more will come."""
        return self.failed is not None or (self.reason is not None and bool(self.done or not self.states_at))

    def check(self):
        """It drew what it draws when it reads everything, and every state is that of its position."""
        assert self.failed is None, self.failed
        assert self.drawn == drawn_after(int(self.prompt[-1]), self.draws)
        assert bool(self.restored) == bool(self.begin)
        for position, state in self.states.items():
            assert state == fake_snapshot(position, int(self.prompt[position - 1]), MANIFEST)


def prompt(length, seed=0):
    """Tokens of a prompt."""
    return (np.arange(length) * 13 + seed) % 900


def read_by(engine, session=None):
    """Tokens that the ranks were given to read."""
    ops = [op for step in engine.sent for op in step.ops if isinstance(op, PrefillOp)]
    return sum(len(op.tokens) // 4 for op in ops)


def test_states_of_a_prompt_come_out_and_only_the_rest_is_read_with_one_of_them():
    """The states that were asked for are those of their positions; one that begins with one reads what follows it."""
    engine = Engine()
    tokens = prompt(2 * GRID + 100)
    first = Reader(engine, "a", tokens, states_at=(GRID, 2 * GRID)).open()
    run_to_the_end(engine, [first])
    first.check()
    assert sorted(first.states) == [GRID, 2 * GRID]
    nothing_is_left(engine)
    before = read_by(engine)
    assert before == len(tokens) - 1  # the last one is fed by the first draw
    second = Reader(engine, "b", tokens, begin=2 * GRID, stored=first.states[2 * GRID]).open()
    run_to_the_end(engine, [second])
    second.check()
    assert second.drawn == first.drawn and read_by(engine) - before == 99
    nothing_is_left(engine)


def test_a_prompt_that_ends_one_token_behind_the_grid_uses_all_of_the_state():
    """With nothing left to read but the token that is drawn after, the ranks read no block at all."""
    engine = Engine()
    tokens = prompt(GRID + 1)
    first = Reader(engine, "a", tokens, states_at=(GRID,)).open()
    run_to_the_end(engine, [first])
    before = read_by(engine)
    second = Reader(engine, "b", tokens, begin=GRID, stored=first.states[GRID]).open()
    run_to_the_end(engine, [second])
    second.check()
    assert second.drawn == first.drawn and read_by(engine) == before
    nothing_is_left(engine)


def test_a_store_that_is_slow_does_not_hold_the_text_up(monkeypatch):
    """The text comes to its end; the request stays open until all of its states are stored."""
    engine = Engine()
    reader = Reader(engine, "a", prompt(3 * GRID + 5), states_at=(GRID, 2 * GRID, 3 * GRID)).open()
    with monkeypatch.context() as patched:
        patched.setattr(engine.states, "take_results", lambda: None)
        for _ in range(20):
            reader.listen()
            engine.turn()
            engine.work_off()
    assert reader.drawn == drawn_after(int(reader.prompt[-1]), 3) and not reader.done and not reader.states
    run_to_the_end(engine, [reader])
    reader.check()
    assert sorted(reader.states) == [GRID, 2 * GRID, 3 * GRID]
    nothing_is_left(engine)


def test_a_store_that_is_full_does_not_hold_the_text_up():
    """The text comes to its end without states; the first that could not be stored is told, no other is tried."""
    engine = Engine()
    engine.states.full = True
    reader = Reader(engine, "a", prompt(3 * GRID + 5), states_at=(GRID, 2 * GRID, 3 * GRID)).open()
    run_to_the_end(engine, [reader])
    reader.check()
    assert not reader.states and [state.position for state in reader.unstored] == [GRID]
    assert "the store is full" in reader.unstored[0].error
    nothing_is_left(engine)


@pytest.mark.parametrize("spoilt", ["other chunks", "cut", "position"])
def test_a_state_that_changes_anything_is_refused(spoilt):
    """A state that was computed otherwise, is damaged, or stands elsewhere fails this request before a token comes."""
    engine = Engine()
    tokens = prompt(GRID + 50)
    described = fake_manifest(GRID, RANKS + 1) if spoilt == "other chunks" else MANIFEST
    position = GRID - 1 if spoilt == "position" else GRID
    stored = fake_snapshot(position, int(tokens[GRID - 1]), described)
    if spoilt == "cut":
        stored = stored[:-3] + b"abc"
    reader = Reader(engine, "a", tokens, begin=GRID, stored=stored).open()
    run_to_the_end(engine, [reader])
    assert reader.failed is not None and reader.failed.code in ("state_mismatch", "invalid_state")
    assert not reader.restored
    nothing_is_left(engine)


PROMPT = st.tuples(
    st.sampled_from([0, GRID, 3 * GRID]),  # where it begins
    st.sampled_from([1, 2, 700, GRID, GRID + 1, 3 * GRID + 7]),  # tokens behind that
    st.sampled_from([1, 3, 20]),  # draws
    st.booleans(),  # whether states are wanted
)


@given(st.lists(PROMPT, min_size=1, max_size=3), st.booleans(), st.integers(0, 1 << 32))
@examples(25)
def test_ranks_may_be_lost_at_any_moment(prompts, beside, seed):
    """Kills between any two messages change no token and no state, and none comes twice."""
    chance = random.Random(seed)
    engine = Engine()
    readers = []
    for n, (begin, length, draws, wanted) in enumerate(prompts):
        tokens = prompt(begin + length, n)
        grid = tuple(range(begin + GRID, len(tokens), GRID)) if wanted else ()
        readers.append(Reader(engine, f"c{n}", tokens, begin, draws, states_at=grid).open())
    texts = {"t": (np.arange(3000) % 900, 300)} if beside else {}
    open_all(engine, texts, {})
    disturb(engine, chance, 150, readers)
    run_to_the_end(engine, readers)
    for reader in readers:
        reader.check()
    engine.to_the_end(texts)
    nothing_is_left(engine)
