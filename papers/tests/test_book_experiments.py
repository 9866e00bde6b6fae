"""Experiments with small language models of books: what is trained on and scored, which jobs there are, and reports."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from dist_attn.errors import ConfigError
from dist_attn_papers.tables.context_length import BATCH_TOKENS, CONTEXT_LENGTH, LENGTHS, TIMES
from dist_attn_papers.tables.experiment import Budget, Done, Experiment
from dist_attn_papers.tables.novels import NOVELS, TEST
from dist_attn_papers.tables.shuffled_books import TRAINED, late, perplexity
from dist_attn_papers.tables.shuffled_text import BOOKS, PART_BYTES, cut_parts, prepare_books
from dist_attn_papers.tables.trained_on_short import LENGTHS as TESTED
from dist_attn_papers.tables.trained_on_short import TRAINED_ON_SHORT


@pytest.fixture
def books(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Small books in the place where the experiments look for them; each line names its book."""
    folder = tmp_path / "data/books"
    folder.mkdir(parents=True)
    draw = random.Random(0)
    for name in NOVELS:
        lines = (f"{name} says {draw.randrange(10**6)} and goes on\n" for _ in range(40))
        (folder / name).write_text("".join(lines))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_parts_are_the_book() -> None:
    """Joined, the parts are the book, and all but the last end with a line and are as long as they should be."""
    book = b"".join(b"line %d of a long book\n" % number for number in range(20_000)) + b"no end"
    parts = list(cut_parts(book))
    assert b"".join(parts) == book and len(parts) > 2
    assert all(part.endswith(b"\n") and PART_BYTES <= len(part) < PART_BYTES + 100 for part in parts[:-1])


def test_the_training_text(books: Path) -> None:
    """It holds all other books once and nothing of the held-out one; it is made once, and alike everywhere."""
    text = prepare_books(books / "one", 99, 300)
    made = text.train.read_bytes()
    assert sum(f"{name} says".encode() in made for name in BOOKS) == len(BOOKS)
    assert made.count(b" says ") == 40 * len(BOOKS) and TEST.encode() not in made
    assert prepare_books(books / "two", 99, 300).train.read_bytes() == made
    text.train.write_bytes(b"kept")
    assert prepare_books(books / "one", 99, 300).train.read_bytes() == b"kept"
    assert prepare_books(books / "one", 2, 300).train.read_bytes().count(b" says ") == 80


def test_what_is_scored(books: Path) -> None:
    """The held-out book's first tokens are scored; asking for more than there are, or for no book, is said."""
    text = prepare_books(books / "out", 99, 300)
    assert len(text.held_out(100)) == 100
    with pytest.raises(ConfigError, match=f"{TEST} has"):
        text.held_out(10**6)
    (books / "data/books" / BOOKS[3]).unlink()
    with pytest.raises(ConfigError, match=BOOKS[3]):
        prepare_books(books / "three", 99, 300)


EXPERIMENTS = {"uv-context": CONTEXT_LENGTH, "scaleformer-lengths": TRAINED_ON_SHORT}


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_jobs_depend_on_no_path(name: str) -> None:
    """Settings are JSON without absolute paths, keys are unique, and seeds come one after the other."""
    jobs = EXPERIMENTS[name].jobs(Budget(), (0, 1))
    assert all('"/' not in json.dumps(job.settings) for job in jobs)
    trained = [job for job in jobs if job.arm != TIMES]
    assert len({job.key for job in jobs}) == len(jobs)
    assert [job.seed for job in trained] == [0] * (len(trained) // 2) + [1] * (len(trained) // 2)


def test_a_batch_has_the_same_tokens_at_every_length() -> None:
    """Rows times length is 2^14 in every arm, and what is scored is cut evenly by every length."""
    runs = [job.settings["run"] for job in CONTEXT_LENGTH.jobs(Budget(), (0,)) if job.arm != TIMES]
    assert {run["segment"] for run in runs} == set(LENGTHS)
    assert {run["segment"] * run["batch"] for run in runs} == {BATCH_TOKENS}
    assert all(run["scored"] % run["segment"] == 0 for run in runs)


def _done(experiment: Experiment, score: Callable[[str], dict[str, float]]) -> list[Done]:
    return [Done(job.arm, job.seed, score(job.arm), 1.0, {}, "") for job in experiment.jobs(Budget(), (0,))]


def _context_scores(arm: str) -> dict[str, float]:
    if arm == TIMES:
        return {f"softmax-{length}": 8.0 / length for length in LENGTHS}
    length = int(arm.partition("-")[2])
    return {perplexity(length): 50.0 + abs(length - 256), TRAINED: 40.0}


def test_the_best_context_length() -> None:
    """The best length and the fall of the times stand beside the paper's, and what is missing is said to be."""
    done = _done(CONTEXT_LENGTH, _context_scores)
    claims = {row[0]: row[2] for row in CONTEXT_LENGTH.report(done).tables[1].rows}
    assert claims["softmax is best at a length of"] == "256"
    assert claims["time of a batch, length 512 over length 8"] == "0.02"
    first = CONTEXT_LENGTH.report(done[1:2]).tables
    assert first[1].rows[0][2] == "not measured" and first[0].rows[0][2] == "298.00 (1)"


def test_longer_than_trained() -> None:
    """Perplexity at each length stands over that at the length trained on, seed by seed; what is missing is said."""

    def scores(arm: str) -> dict[str, float]:
        found = {perplexity(length): 60.0 * length / TESTED[0] for length in TESTED}
        return {**found, **{late(length): 1.0 for length in TESTED}, "parameters": 7e5}

    done = _done(TRAINED_ON_SHORT, scores)
    whole, _, ratios = TRAINED_ON_SHORT.report(done).tables
    assert ratios.rows[0][1:] == ("4.000 (1)", "16.000 (1)", "64.000 (1)")
    assert whole.rows[1][1:3] == ("700,000", "60.00 (1)")
    assert TRAINED_ON_SHORT.report(done[:1]).tables[2].rows[1][1] == "not measured"


def test_arms_differ_in_attention_and_positions_alone() -> None:
    """All arms of the experiment about length have the same sizes, texts and steps."""
    jobs = TRAINED_ON_SHORT.jobs(Budget(), (0,))
    same = {
        json.dumps([{**job.settings["model"], "mixer": 0, "positions": 0}, job.settings["run"]], sort_keys=True)
        for job in jobs
    }
    assert len(jobs) == 6 and len(same) == 1
