"""RFA's Table 3: both experiments are made of jobs that can be filed, and report what is done, perhaps not all."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from dist_attn.checkpoints import load_any_model, save_model
from dist_attn.errors import ConfigError
from dist_attn.models import TextClassifier, TextClassifierConfig
from dist_attn.ops import LocalSequenceOps
from dist_attn.text import ByteTokeniser
from dist_attn_papers.made_up import ListOps
from dist_attn_papers.tables.counted_baselines import (
    byte_histogram_accuracy,
    first_operator_accuracy,
    pair_histogram_accuracy,
    towers_of,
)
from dist_attn_papers.tables.experiment import Budget, Done, Experiment
from dist_attn_papers.tables.passages import AUTHORS, PassageSpec, draw_pairs, plain, read_passages
from dist_attn_papers.tables.rfa_table3 import RFA_TABLE3
from dist_attn_papers.tables.rfa_table3_speed import MIXERS, RFA_TABLE3_SPEED, NaiveSoftmaxOps
from tests.support.closeness import assert_close

SMALL = {
    "vocab_size": 256,
    "num_classes": 2,
    "encoder": {
        "hidden_size": 8,
        "num_layers": 1,
        "mlp_size": 8,
        "mixer": {"kind": "bidirectional", "attention": "softmax", "hidden_size": 8, "num_heads": 2},
    },
}


def _made_up(experiment: Experiment, seeds: tuple[int, ...], scores: dict[str, float]) -> list[Done]:
    jobs = experiment.jobs(Budget(), seeds)
    return [Done(job.arm, job.seed, dict(scores), 60.0, json.loads(json.dumps(job.settings)), "here") for job in jobs]


def test_the_naive_peer_computes_the_same() -> None:
    """Scores in memory give the logits of the fused kernel."""
    torch.manual_seed(0)
    model = TextClassifier(TextClassifierConfig.model_validate(SMALL))
    tokens_BL = torch.randint(0, 256, (3, 13))
    assert_close(model(tokens_BL, NaiveSoftmaxOps()), model(tokens_BL, LocalSequenceOps()))


def test_the_speed_report_is_made_of_what_is_done() -> None:
    """Ratios are peer over ours for time and ours over peer for memory, of one precision alone too."""
    scores = {f"{arm}:{what}": value for arm in MIXERS for what, value in (("seconds", 2.0), ("peak_bytes", 4e6))}
    scores |= {f"{arm}:spread": 0.1 for arm in MIXERS}
    scores |= {"rfa-gaussian:seconds": 0.5, "rfa-gaussian:peak_bytes": 1e6}
    done = _made_up(RFA_TABLE3_SPEED, (0,), scores)
    assert [one.arm for one in done[:2]] == ["float32-512", "float32-1024"]
    report = RFA_TABLE3_SPEED.report(done[:3])
    speeds, memory = report.tables
    assert speeds.rows[1][6] == "4.00x" and speeds.rows[1][-1] == "1.1x"
    assert memory.rows[0][5] == "25%"
    assert len(RFA_TABLE3_SPEED.report(done).tables) == 4
    more_seeds = [*done, *(replace(one, seed=1) for one in done)]
    assert RFA_TABLE3_SPEED.report(more_seeds).tables == RFA_TABLE3_SPEED.report(done).tables


SPEC = PassageSpec(train=6, held_out=2, min_length=20, max_length=50)


@pytest.fixture(scope="module")
def books(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small books of numbered words; the letter of the words is the author's."""
    folder = tmp_path_factory.mktemp("books")
    for number, books in enumerate(AUTHORS.values()):
        for book in books:
            words = " ".join(f"{chr(97 + number)}{count}" for count in range(800))
            (folder / f"{book}.txt").write_text(f'"{words}"')
    return folder


def test_no_byte_is_of_two_passages_and_no_part_of_both_splits(books: Path) -> None:
    """Passages of a book do not overlap, and none that is held out lies in a part that is trained on."""
    train, held_out = read_passages(SPEC, books)
    assert [len(train), len(held_out)] == [6 * len(AUTHORS), 2 * len(AUTHORS)]
    assert not any(passage.is_held_out for passage in train) and all(passage.is_held_out for passage in held_out)
    for book in {passage.book for passage in train}:
        text = plain((books / f"{book}.txt").read_text())
        own = sorted((p for p in (*train, *held_out) if p.book == book), key=lambda passage: passage.start)
        assert all(a.start + len(a.text) <= b.start for a, b in pairwise(own))
        for passage in own:
            last = passage.start + len(passage.text) - 1
            assert passage.text == text[passage.start : last + 1] and 20 <= len(passage.text) <= 50
            assert len(text) * passage.part // 40 <= passage.start <= last < len(text) * (passage.part + 1) // 40
    assert read_passages(SPEC, books) == (train, held_out)


def test_towers_begin_with_the_encoder_that_knows_authors(tmp_path: Path) -> None:
    """A classifier of pairs has the embedding and the encoder of the folder's model, and a head of its own seed."""
    torch.manual_seed(1)
    trained = TextClassifier(TextClassifierConfig.model_validate(SMALL))
    save_model(trained, tmp_path / "authors", tokeniser=ByteTokeniser())
    towers = load_any_model(towers_of(tmp_path / "authors", {**SMALL, "texts": 2}, 3, tmp_path / "start"))
    assert isinstance(towers, TextClassifier) and towers.config.texts == 2
    for name, weight in trained.state_dict().items():
        if not name.startswith("head"):
            assert torch.equal(towers.state_dict()[name], weight), name


def test_pairs_are_half_by_one_author(books: Path) -> None:
    """Every other pair is of two passages of one author, the rest of two authors; no passage meets itself."""
    _, held_out = read_passages(SPEC, books)
    pairs = draw_pairs(held_out, 200, seed=1)
    assert [same for _, _, same in pairs] == [True, False] * 100
    assert all((first.author == second.author) is same and first != second for first, second, same in pairs)
    assert {passage.author for first, second, _ in pairs for passage in (first, second)} == set(AUTHORS)
    assert draw_pairs(held_out, 200, seed=1) == pairs


def test_an_edition_leaves_no_trace() -> None:
    """Lines, quotation marks, dashes, brackets and italics are the same whoever typed them."""
    assert plain("  ``Well,'' said--she,\n _he_ [too]. ") == plain('"Well," said - she, he (too).'.replace(" - ", "-"))


def test_missing_books_and_too_few_passages_are_named(books: Path, tmp_path: Path) -> None:
    """A book that is not there, and an author who has not written enough, are refused by name."""
    with pytest.raises(ConfigError, match=r"emma\.txt is not there"):
        read_passages(SPEC, tmp_path)
    with pytest.raises(ConfigError, match=r"austen has .* needed are 9000"):
        read_passages(replace(SPEC, train=9000), books)


def test_counting_finds_what_can_be_counted() -> None:
    """Letters that differ are told apart by counts; the outermost operator tells more than the commonest value."""
    texts = ["a" * 9 + "b", "b" * 9 + "a"] * 4
    assert byte_histogram_accuracy(texts, [0, 1] * 4, texts[:3], [0, 1, 1]) == pytest.approx(2 / 3)
    pairs = [("aab", "aba"), ("aab", "bba"), ("bba", "bab"), ("bab", "aba")] * 4
    assert pair_histogram_accuracy(pairs, [1, 0] * 8, pairs, [1, 0] * 8) == 1.0
    commonest, under = first_operator_accuracy(ListOps(0, 30, 60), range(300), range(300, 400))
    assert 0.1 < commonest < under < 0.6


def test_the_jobs_can_be_filed_and_name_no_place() -> None:
    """Arms of a seed come before those of the next; settings are JSON without a path of a machine."""
    jobs = RFA_TABLE3.jobs(Budget(), (0, 1))
    assert [job.seed for job in jobs] == sorted(job.seed for job in jobs)
    assert len({job.key for job in jobs}) == len(jobs)
    assert "/" not in json.dumps([{**job.settings, "encoder_of": None} for job in jobs])
    assert all(need in {other.key for other in jobs} for job in jobs for need in job.needs)


def test_the_accuracy_report_is_made_of_what_is_done() -> None:
    """Means over the seeds that there are; differences seed by seed; nothing of what is still to be done."""
    scores = {"accuracy": 0.5, "nats": 1.0, "parameters": 1000.0, "commonest": 0.2, "held_out": 10.0}
    done = _made_up(RFA_TABLE3, (0, 1), scores)
    done = [
        replace(one, scores=scores | {"accuracy": 0.6}) if one.arm == "listops-rfa-gaussian" else one for one in done
    ]
    report = RFA_TABLE3.report(done)
    assert report.tables[0].rows[1][:2] == ("rfa-gaussian", "60.0 ± 0.0 (2)")
    assert ("listops", "rfa-gaussian", "10.0 ± 0.0 (2)", "+10.0, +10.0") in report.tables[-1].rows
    for count in range(1, len(done)):
        assert RFA_TABLE3.report(done[:count]).tables
