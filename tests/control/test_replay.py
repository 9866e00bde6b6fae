"""Ranks are lost at any moment: open requests end as in an undisturbed run, and nothing is sent twice."""

import random

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dist_attn.wire.messages import Cancel, Failed, Generated, Rows, RowSpec, SamplingSpec, Tokens
from dist_attn.wire.rank_messages import CloseOp, SaveOp
from tests.support.fake_rank import DIE, drawn_after, fake_hidden, fake_scores
from tests.support.opening import open_completion, open_encoding
from tests.support.simulated_engine import RANKS, SETTINGS, Engine, disturb

MARKED = 91  # tokens of a row whose end is marked


def check(engine, texts, prompts):
    """Every row and every token is there once, as an undisturbed run gives them."""
    for name, (tokens, window) in texts.items():
        starts, vectors = engine.rows(name)
        assert starts == list(range(0, len(tokens), window or MARKED))
        hidden = fake_hidden(tokens, 0).astype(np.float64)
        means = [hidden[at : at + (window or MARKED)].mean(0) for at in starts]
        assert np.array_equal(vectors, np.array(means, dtype=np.float32))
    for name, (prompt, count) in prompts.items():
        assert engine.tokens(name) == drawn_after(prompt[-1], count)


def open_all(engine, texts, prompts):
    """Open the requests and send all of their tokens."""
    for name, (tokens, window) in texts.items():
        engine.api(open_encoding(name, RowSpec("window", window) if window else RowSpec("sentence")))
        sent = tokens if window else np.where(np.arange(1, len(tokens) + 1) % MARKED, tokens, ~tokens)
        engine.api(Tokens(name, 0, np.asarray(sent, dtype="<i4").tobytes(), True))
    for name, (prompt, count) in prompts.items():
        engine.api(open_completion(name, SamplingSpec(count, temperature=0.0)))
        engine.api(Tokens(name, 0, np.asarray(prompt, dtype="<i4").tobytes(), True))


@pytest.mark.parametrize("max_active", [128, 2], ids=["room", "crowded"])
@given(
    st.lists(st.tuples(st.integers(1, 7000), st.sampled_from([64, 300, 512, None])), max_size=3),
    st.lists(st.tuples(st.integers(1, 5000), st.integers(1, 20)), max_size=4),
    st.integers(0, 1 << 32),
)
@example([(4097, 64)], [], 3600)
@example([(5000, None), (182, None)], [], 7)
@example([], [(2050, 1), (1, 3), (1026, 1), (1, 1)], 1)  # put aside at a state that was here already
def test_a_rank_may_be_lost_at_any_moment(max_active, lengths, asked, seed):
    """Kills between any two messages, in prefill, in decoding, between rounds of decoding of one step, while states
    are put aside and during a replay, change no row and no token.
    """
    engine = Engine(SETTINGS.replace(max_active=max_active))
    texts = {f"t{n}": (np.arange(length) * 7 % 900, window) for n, (length, window) in enumerate(lengths)}
    prompts = {f"p{n}": ((np.arange(length) * 11 + n) % 900, count) for n, (length, count) in enumerate(asked)}
    open_all(engine, texts, prompts)
    disturb(engine, random.Random(seed), 120)
    engine.to_the_end([*texts, *prompts])
    assert not [m for m in engine.received if isinstance(m, Failed)]
    check(engine, texts, prompts)
    assert not engine.states.kept and not engine.states.unfinished


@pytest.mark.parametrize("max_active", [128, 2], ids=["room", "crowded"])
@given(
    st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 9), st.integers(0, 2)), min_size=1, max_size=4),
    st.integers(0, 1 << 32),
)
@example([(1, 0, 1), (513, 0, 0), (4097, 4, 2)], 7)
def test_scores_of_prompts_outlive_lost_ranks(max_active, asked, seed):
    """The scores of every prompt token but the first come once, in order and before the drawn tokens, also over the
    edges of blocks and slices, whichever ranks are killed; where no tokens are asked for, the request ends with them.
    """
    engine = Engine(SETTINGS.replace(max_active=max_active))
    prompts = {f"p{n}": (np.arange(length) * 11 + n) % 900 for n, (length, _, _) in enumerate(asked)}
    for (name, prompt), (_, count, likeliest) in zip(prompts.items(), asked, strict=True):
        engine.api(open_completion(name, SamplingSpec(count, temperature=0.0, prompt_logprobs=likeliest)))
        engine.api(Tokens(name, 0, prompt.astype("<i4").tobytes(), True))
    disturb(engine, random.Random(seed), 120)
    engine.to_the_end(prompts)
    assert not [m for m in engine.received if isinstance(m, Failed)]
    for (name, prompt), (_, count, likeliest) in zip(prompts.items(), asked, strict=True):
        starts, vectors = engine.rows(name, 1 + 2 * likeliest)
        assert starts == list(range(len(prompt) - 1))
        assert np.array_equal(vectors, fake_scores(prompt, likeliest))
        assert engine.tokens(name) == drawn_after(int(prompt[-1]), count)
        kinds = [type(m) for m in engine.of(name) if isinstance(m, Rows | Generated)]
        assert kinds == sorted(kinds, key=[Rows, Generated].index)
        *_, last = [m for m in engine.of(name) if isinstance(m, Generated)]
        assert last.finish_reason == ("length" if len(engine.tokens(name)) == count else "stop")
    assert not engine.states.kept and not engine.states.unfinished


def test_a_state_waits_for_the_rows_of_slower_ranks():
    """A state that a fast rank saved is not gone on from while a slower one still owes rows of the text before it."""
    engine = Engine()
    texts = {"a": (np.arange(4097) * 7 % 900, 64)}
    open_all(engine, texts, {})
    engine.turn()
    engine.turn()
    saving = next(rank for rank, box in engine.inboxes.items() if any(isinstance(op, SaveOp) for op in box[0].ops))
    while engine.work(saving):
        pass
    assert not engine.states.kept
    engine.kill(saving)
    engine.to_the_end(texts)
    check(engine, texts, {})


def test_no_more_than_an_interval_is_read_again():
    """With states saved every 1,024 tokens a loss costs that much and what was under way, however long the text."""
    engine = Engine()
    texts = {"a": (np.arange(60_000) % 900, 512)}
    engine.api(open_encoding("a", RowSpec()))
    sent = 0
    for _ in range(12):
        credit = max((m.upto for m in engine.of("a") if hasattr(m, "upto")), default=0)
        stop = min(60_000, credit)
        engine.api(Tokens("a", sent, np.asarray(texts["a"][0][sent:stop], dtype="<i4").tobytes(), stop == 60_000))
        sent = stop
        engine.turn()
        engine.work_off()
    read = engine.controller.status(engine.now)
    assert sent > 40_000
    engine.kill(1)
    again = engine.controller.status(engine.now).replayed_tokens - read.replayed_tokens
    assert 0 <= again <= RANKS * SETTINGS.save_tokens + SETTINGS.steps_in_flight * RANKS * SETTINGS.block_tokens


def test_a_request_that_kills_the_ranks_fails_alone():
    """A request of which the ranks die at every try is given up; those beside it end as if it had not been there."""
    engine = Engine()
    good = {"a": (np.arange(3000) % 900, 512), "b": (np.arange(900), 64)}
    prompts = {"p": (np.arange(700), 9)}
    engine.api(open_encoding("bad", RowSpec()))
    engine.api(Tokens("bad", 0, np.full(700, DIE, dtype="<i4").tobytes(), True))
    open_all(engine, good, prompts)
    engine.to_the_end(["bad", *good, *prompts])
    (failed,) = [m for m in engine.received if isinstance(m, Failed)]
    assert (failed.request_id, failed.code) == ("bad", "engine_failed")
    assert f"{SETTINGS.losses_to_fail} times" in failed.message
    check(engine, good, prompts)


def test_decoding_goes_on_from_a_state_between_its_draws():
    """A loss late in a long answer draws again only what came after the last saved state."""
    engine = Engine()
    prompts = {"p": (np.arange(40), 30)}
    open_all(engine, {}, prompts)
    while len(engine.tokens("p")) < 20:
        engine.turn()
        engine.work_off()
    engine.kill(0)
    assert engine.controller.status(engine.now).replayed_tokens <= SETTINGS.save_draws + SETTINGS.steps_in_flight
    engine.to_the_end(prompts)
    check(engine, {}, prompts)


@pytest.mark.parametrize("before", [0, 2, 9, 20])
@pytest.mark.parametrize(
    ("more", "undisturbed"),
    [
        ({"presence_penalty": 0.5}, drawn_after(39, 30, penalises=True)),
        ({"grammar": "g"}, drawn_after(39, 30, follows=True)),
        ({"repetition_penalty": 1.5, "grammar": "g"}, drawn_after(39, 30, penalises=True, follows=True)),
    ],
)
def test_what_was_drawn_before_a_loss_counts(before, more, undisturbed):
    """Draws that depend on all that was drawn go on as in an undisturbed run, from saved states or the beginning:
    by penalties, and by a grammar, which asks for the order too.
    """
    engine, prompt = Engine(), np.arange(40)
    engine.api(open_completion("p", SamplingSpec(30, temperature=0.0, **more)))
    engine.api(Tokens("p", 0, prompt.astype("<i4").tobytes(), True))
    for losses in range(1, 3):
        while len(engine.tokens("p")) < before + 5 * (losses - 1):
            engine.turn()
            engine.work_off()
        engine.kill(losses % RANKS)
    engine.to_the_end(["p"])
    assert engine.tokens("p") == undisturbed != drawn_after(39, 30)
    assert len(undisturbed) == 30


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_cancelled_request_is_not_done_again(when):
    """Cancelling around a loss leaves nothing behind, on the ranks or among the states."""
    engine = Engine()
    open_all(engine, {"a": (np.arange(6000) % 900, 512)}, {})
    engine.turn()
    engine.turn()
    engine.work_off()
    if when == "before":
        engine.api(Cancel("a"))
    engine.kill(0)
    if when == "after":
        engine.api(Cancel("a"))
    for _ in range(3):
        engine.turn()
    assert engine.controller.idle and not engine.states.kept
    assert all(not executor.position for executor in engine.ranks.values())


def test_tokens_are_drawn_while_a_block_is_read():
    """Beside a long text tokens come several times in a step; a loss between two of these rounds changes none."""
    engine, prompts = Engine(), {"p": (np.arange(40), 60)}
    texts = {"a": (np.arange(7000) * 7 % 900, 512)}
    open_all(engine, texts, prompts)
    while not engine.rounds or max(engine.rounds.values()) < 2:
        assert not all(engine.ended(name) for name in [*texts, *prompts]), "no step had further rounds"
        engine.turn()
        for rank in range(RANKS):
            engine.work(rank, heard=1)
    engine.kill(1)
    engine.to_the_end([*texts, *prompts])
    check(engine, texts, prompts)


def test_a_long_text_gives_its_place_to_prompts_and_goes_on():
    """With one place for a state a text that is being read is put aside for each prompt, and reads nothing twice."""
    engine = Engine(SETTINGS.replace(max_active=1, block_tokens=512, blocks_of_credit=8))
    texts = {"a": (np.arange(7000) * 7 % 900, 512)}
    open_all(engine, texts, {})
    engine.turn()
    for rank in range(RANKS):
        engine.work(rank)
    prompts = {f"p{n}": (np.arange(40 + n), 5) for n in range(3)}
    open_all(engine, {}, prompts)
    engine.to_the_end(prompts)
    assert not engine.ended("a")
    engine.to_the_end(texts)
    check(engine, texts, prompts)
    assert engine.controller.status(engine.now).replayed_tokens == 0
    closes = [op for message in engine.sent for op in message.ops if isinstance(op, CloseOp)]
    assert sum(op.request == 1 for op in closes) > RANKS, "it was never put aside"


def blocks_of(engine, number):
    """How many tokens of a request the ranks were sent."""
    blocks = [op for step in engine.sent for op in step.ops if hasattr(op, "lengths") and op.request == number]
    return max((block.start + sum(block.lengths) for block in blocks), default=0)


@pytest.mark.parametrize("when", ["coming", "kept"])
def test_a_text_that_was_put_aside_outlives_its_ranks(when):
    """A loss while its state is on the way, or while it waits with it, leaves it to be read on or again."""
    engine = Engine(SETTINGS.replace(max_active=1, block_tokens=512, blocks_of_credit=8, save_tokens=1024))
    texts, prompts = {"a": (np.arange(7000) * 7 % 900, 512)}, {"p": (np.arange(40), 30)}
    open_all(engine, texts, {})
    while blocks_of(engine, 1) < 4096:
        engine.turn()
        for rank in range(RANKS):
            engine.work(rank)
    open_all(engine, {}, prompts)
    while not any(op == CloseOp(1) for step in engine.sent for op in step.ops):
        engine.turn()
        for rank in range(RANKS):
            engine.work(rank, heard=1)
    while when == "kept" and engine.states.kept.get(1, b"")[:8] != blocks_of(engine, 1).to_bytes(8, "little"):
        for rank in range(RANKS):
            engine.work(rank)
        engine.turn()
    engine.kill(0)
    engine.to_the_end([*texts, *prompts])
    check(engine, texts, prompts)


def test_a_state_that_cannot_be_kept_ends_only_its_text():
    """Where the disk is full, a text that has to make room fails and says why; the others go on."""
    engine = Engine(SETTINGS.replace(max_active=1, block_tokens=512, blocks_of_credit=8))
    engine.states.finish = lambda *_: False
    open_all(engine, {"a": (np.arange(7000) % 900, 512)}, {})
    engine.turn()
    prompts = {"p": (np.arange(40), 5)}
    for rank in range(RANKS):
        engine.work(rank)
    open_all(engine, {}, prompts)
    engine.to_the_end(["a", *prompts])
    (failed,) = [m for m in engine.received if isinstance(m, Failed)]
    assert (failed.request_id, failed.code) == ("a", "engine_failed")
    assert "could not be kept" in failed.message
    check(engine, {}, prompts)
